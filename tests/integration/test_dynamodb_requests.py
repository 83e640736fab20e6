"""How often a request goes to DynamoDB, counted on the wire, and what the counting itself is worth.

Each is a round trip that somebody waits for or pays: one batched read for a cold request and none for a warm one, a
claim and a settlement for everybody, a hold and its release for a key with limits.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import boto3
import pytest
from fastapi import FastAPI

from completions.bootstrap import build_parts, openai_completions_app
from completions.domain.limits import KeyLimits
from completions.domain.metering import Principal
from completions.registry.dynamodb import put_key
from completions.web.auth import secret_digest
from completions_cli.local.stack import LocalStack
from proxied import proxied

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))  # the benchmark counts in the same way

from dynamodb_traffic import CountingProxy, item_size, totals, write_units

LIMITS = KeyLimits(requests_per_minute=1000, tokens_per_minute=10**6, tokens_per_day=10**9, nanos_per_month=10**12)
READ = Counter({"BatchGetItem": 1})
UNLIMITED = Counter({"PutItem": 1, "UpdateItem": 1})
LIMITED = Counter({"PutItem": 1, "UpdateItem": 3})


@pytest.fixture
def proxy(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingProxy]:
    """Before the stack's tables, for every client that is made from here on."""
    with CountingProxy(stack.environment["AWS_ENDPOINT_URL_DYNAMODB"]) as counting:
        for name, value in stack.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", counting.url)
        yield counting


def new_key(stack: LocalStack, limits: KeyLimits) -> str:
    secret = f"sk-{uuid.uuid4()}"
    with closing(boto3.client("dynamodb", endpoint_url=stack.environment["AWS_ENDPOINT_URL_DYNAMODB"])) as client:
        principal = Principal(f"key-{uuid.uuid4()}", "ada", limits=limits)
        put_key(client, stack.environment["REGISTRY_TABLE"], secret_digest(secret), principal)
    return secret


def asked(app: FastAPI, key: str, *, stream: bool) -> None:
    body = {"model": "demo", "prompt": "import ", "max_tokens": 4, "stream": stream}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    reply = proxied(app, "POST", "/v1/completions", headers=headers, body=json.dumps(body).encode())
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
@pytest.mark.parametrize(
    ("limits", "metering"), [(KeyLimits(), UNLIMITED), (LIMITS, LIMITED)], ids=["no limits", "limits"]
)
def test_a_request_goes_to_dynamodb_no_more_often_than_it_must(
    stack: LocalStack, proxy: CountingProxy, stream: bool, limits: KeyLimits, metering: Counter[str]
) -> None:
    key = new_key(stack, limits)
    app = openai_completions_app(build_parts())

    asked(app, key, stream=stream)
    cold = proxy.taken()
    asked(app, key, stream=stream)
    warm = proxy.taken()

    assert Counter(call.operation for call in cold) == READ + metering
    assert Counter(call.operation for call in warm) == metering


def test_a_start_without_a_request_asks_nothing(proxy: CountingProxy) -> None:
    openai_completions_app(build_parts())
    assert proxy.taken() == []


def test_a_key_that_nobody_knows_costs_one_read(proxy: CountingProxy) -> None:
    app = openai_completions_app(build_parts())
    body = {"model": "demo", "prompt": "import "}
    headers = {"authorization": "Bearer sk-nobody", "content-type": "application/json"}
    reply = proxied(app, "POST", "/v1/completions", headers=headers, body=json.dumps(body).encode())
    assert reply.status_code == 401
    assert Counter(call.operation for call in proxy.taken()) == READ


@pytest.mark.parametrize(("limits", "units"), [(KeyLimits(), 4), (LIMITS, 6)], ids=["no limits", "limits"])
def test_a_warm_request_takes_the_write_units_that_its_items_sizes_say(
    stack: LocalStack, proxy: CountingProxy, limits: KeyLimits, units: int
) -> None:
    """A record of less than a KB is written twice, and twice in the index by day; a hold is taken and given back."""
    key = new_key(stack, limits)
    app = openai_completions_app(build_parts())
    asked(app, key, stream=False)
    proxy.taken()
    asked(app, key, stream=False)
    assert totals(proxy.taken())[1:] == (units, 0)


# The rule itself, by AWS's words on item sizes and units


@pytest.mark.parametrize(
    ("item", "size"),
    [
        ({"pk": {"S": "é"}}, 2 + 2),
        ({"n": {"N": "27"}}, 1 + 2),
        ({"n": {"N": "-27"}}, 1 + 3),
        ({"n": {"N": "123"}}, 1 + 3),
        ({"flag": {"BOOL": True}, "none": {"NULL": True}}, 4 + 1 + 4 + 1),
        ({"list": {"L": [{"S": "ab"}]}}, 4 + 3 + 1 + 2),
        ({"map": {"M": {"k": {"S": "v"}}}}, 3 + 3 + 1 + 1 + 1),
    ],
)
def test_an_item_s_size_is_its_names_and_values(item: dict[str, dict[str, object]], size: int) -> None:
    assert item_size(item) == size


def test_a_write_costs_a_unit_for_each_kilobyte_begun_and_twice_in_a_transaction() -> None:
    small, large = {"pk": {"S": "x" * 1022}}, {"pk": {"S": "x" * 1023}}
    assert write_units({}, small) == 1
    assert write_units({}, large) == 2
    assert write_units(large, small) == 2
    assert write_units({}, large, transaction=True) == 4


def test_an_index_costs_the_same_again_only_where_its_item_changes() -> None:
    item = {"pk": {"S": "x"}, "day_shard": {"S": "d"}, "created_at": {"S": "t"}}
    assert write_units({}, item) == 2
    assert write_units(item, item) == 1
    assert write_units(item, {**item, "created_at": {"S": "u"}}) == 3
