"""What a function does, and leaves undone, while it starts."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from completions import handlers
from completions.dialects.extra_fields import EXTRA_FIELDS
from completions.dialects.sampling_fields import SamplingFields
from completions.web import framework


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    found = gc.get_threshold()
    yield found
    gc.unfreeze()
    gc.set_threshold(*found)


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_collector_rests_until_the_function_is_ready() -> None:
    code = """
import gc
usual = gc.get_threshold()
from completions import handlers
resting = gc.get_threshold()
handlers.ready()
print(gc.isenabled(), resting[0] > 100 * usual[0], gc.get_threshold() == usual, gc.get_freeze_count() > 0)
"""
    assert printed(code) == "True True True True"


def test_what_the_start_made_is_kept_out_of_later_collections(thresholds: tuple[int, int, int]) -> None:
    handlers.ready()
    assert gc.get_freeze_count() > 0
    assert gc.collect() >= 0


def test_only_fastapis_own_models_are_built_late() -> None:
    assert "defer_build" not in BaseModel.model_config
    code = """
from completions.web import framework
from fastapi.openapi.models import OpenAPI
from pydantic import BaseModel
class Own(BaseModel):
    number: int
print(OpenAPI.__pydantic_complete__, Own.__pydantic_complete__)
"""
    assert printed(code) == "False True"
    app = framework.FastAPI()
    assert app.openapi()["openapi"].startswith("3.")  # built now that it is used


def test_the_names_of_what_may_be_let_through_are_those_of_the_fields() -> None:
    assert set(SamplingFields.model_fields) == EXTRA_FIELDS
