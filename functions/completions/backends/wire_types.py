"""Types that several containers' records have in common."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import ConfigDict, Field

TokenCount: TypeAlias = Annotated[int, Field(ge=0, le=2**31)]
"""What a container may claim to have used: the bill is made of it."""

BUILT_WHEN_USED: Final = ConfigDict(defer_build=True)
"""A function speaks to few of the container families, and need not wait at its start for the models of all."""
