"""The table adapters on moto's server, where moto is right: conditional writes, batched reads, queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config

from completions.domain.catalog import Capability, ModelLimits, ModelPrice, ModelRoute, Parameter
from completions.domain.completion import Usage
from completions.domain.errors import BackendUnavailableError, DuplicateRequestError, MeteringError
from completions.domain.limits import KeyLimits
from completions.domain.metering import Outcome, Principal, Reservation, Timings, UsageRecord
from completions.metering.dynamodb import DynamoUsageLedger, FailOpen
from completions.metering.rollup_items import RolledRecord
from completions.metering.rollup_queries import day_claims
from completions.registry.dynamodb import DynamoRegistry, put_key, put_model
from completions_cli.local.tables import create_tables, moto_dynamodb
from fakes import ManualClock
from ledger_reader import LedgerReader

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
PRINCIPAL = Principal("key-1", "ada", team="compilers", allowed_models=frozenset({"coder"}))
ROUTE = ModelRoute(
    model_id="coder",
    endpoint_name="coder-endpoint",
    family="vllm",
    context_length=8192,
    created=1_700_000_000,
    aliases=("acme/coder", "coder-latest"),
    fim_family="qwen",
    price=ModelPrice("2026-11", 150, 75, 600),
    fallbacks=("small",),
    adapter="sql",
    stop_tokens=("<|im_end|>",),
    limits=ModelLimits(output_tokens=512, stops=4, logprobs=5),
    timeout_seconds=30.5,
    read_timeout_seconds=5,
    start_seconds=240,
    wait_for_start=True,
    isolate_prefix_cache=False,
    capabilities={Parameter.LOGPROBS: Capability.REFUSED},
)
RESERVATION = Reservation(
    record_id="r-1",
    request_id="r-1",
    principal=PRINCIPAL,
    dialect="openai",
    model="coder",
    endpoint_name="coder-endpoint",
    streamed=True,
    created_at=NOON,
)
RECORD = UsageRecord(
    reservation=RESERVATION,
    model="coder",
    endpoint_name="coder-endpoint",
    outcome=Outcome.SUCCEEDED,
    usage=Usage(7, 11, cached_tokens=2),
    timings=Timings(queue_ms=3, first_token_ms=40, total_ms=90),
    attempts=1,
    variant="AllTraffic",
)


@pytest.fixture(scope="module")
def client(project_root: Path) -> Iterator[DynamoDBClient]:
    # every moto server of a process has the same tables, a set for each region; the local stack's are in another one
    settings = Config(region_name="eu-central-1", retries={"total_max_attempts": 1})
    with moto_dynamodb() as url, closing(boto3.client("dynamodb", endpoint_url=url, config=settings)) as tables:
        create_tables(tables, project_root / "infra" / "tables.yaml")
        yield tables


@pytest.fixture
def ledger(client: DynamoDBClient) -> DynamoUsageLedger:
    return DynamoUsageLedger(client, "UsageTable", 400, ManualClock(now=NOON))


def numbered(name: str) -> tuple[Reservation, UsageRecord]:
    reservation = replace(RESERVATION, record_id=name, request_id=name)
    return reservation, replace(RECORD, reservation=reservation)


def test_a_route_comes_back_as_it_was_put_under_every_name(client: DynamoDBClient) -> None:
    put_model(client, "RegistryTable", ROUTE)
    registry = DynamoRegistry(client, "RegistryTable", ManualClock(), cache_seconds=30)

    assert [registry.route(name) for name in ("coder", "acme/coder", "coder-latest")] == [ROUTE] * 3
    assert [route.model_id for route in registry.routes()].count("coder") == 1
    assert registry.route("unknown") is None
    assert registry.route("") is None


def test_a_principal_comes_back_by_the_digest_alone(client: DynamoDBClient) -> None:
    put_key(client, "RegistryTable", "d1", PRINCIPAL)
    registry = DynamoRegistry(client, "RegistryTable", ManualClock(), cache_seconds=30)

    assert registry.principal("d1") == PRINCIPAL
    assert registry.principal("d2") is None


def test_key_and_model_are_one_read_and_a_warm_request_none(client: DynamoDBClient) -> None:
    put_key(client, "RegistryTable", "d3", PRINCIPAL)
    put_model(client, "RegistryTable", ROUTE)
    clock = ManualClock()
    registry = DynamoRegistry(client, "RegistryTable", clock, cache_seconds=30)
    calls: list[str] = []
    client.meta.events.register("before-call.dynamodb", lambda model, **_: calls.append(model.name), unique_id="count")
    try:
        registry.principal("d3", next_model="coder")
        registry.route("coder")
        assert calls == ["BatchGetItem"]
        clock.advance(29)
        registry.principal("d3", next_model="coder")
        registry.route("coder")
        assert calls == ["BatchGetItem"]
        clock.advance(2)
        registry.principal("d3", next_model="coder")
        assert calls == ["BatchGetItem"] * 2
    finally:
        client.meta.events.unregister("before-call.dynamodb", unique_id="count")


def test_a_flood_of_wrong_keys_does_not_make_a_known_key_unknown(client: DynamoDBClient) -> None:
    put_key(client, "RegistryTable", "d4", PRINCIPAL)
    put_model(client, "RegistryTable", ROUTE)
    registry = DynamoRegistry(client, "RegistryTable", ManualClock(), cache_seconds=30, most_cached=10)
    assert registry.principal("d4") == PRINCIPAL
    for number in range(12):
        assert registry.principal(f"wrong-{number}") is None

    assert registry.principal("d4", next_model="coder") == PRINCIPAL
    assert registry.route("coder") == ROUTE


@pytest.mark.parametrize("name", ["", "x" * 1025, "é" * 600])
def test_a_name_that_can_be_no_key_is_an_unknown_model(client: DynamoDBClient, name: str) -> None:
    registry = DynamoRegistry(client, "RegistryTable", ManualClock(), cache_seconds=30)
    assert registry.principal("nobody", next_model=name) is None
    assert registry.route(name) is None


def test_an_item_that_cannot_be_read_says_so_without_its_content(client: DynamoDBClient) -> None:
    client.put_item(
        TableName="RegistryTable",
        Item={"pk": {"S": "KEY#broken"}, "sk": {"S": "KEY"}, "key_id": {"S": "k"}, "admin": {"S": "private"}},
    )
    registry = DynamoRegistry(client, "RegistryTable", ManualClock(), cache_seconds=30)
    with pytest.raises(BackendUnavailableError) as caught:
        registry.principal("broken")
    assert caught.value.detail == "registry item 'KEY': wrong admin, owner"
    assert "private" not in str(caught.value)


def test_a_claim_and_its_settlement_are_one_record(client: DynamoDBClient, ledger: DynamoUsageLedger) -> None:
    reservation, record = numbered("one-record")
    ledger.reserve(reservation).settle(record)

    settled = LedgerReader(client, "UsageTable").settled("one-record")
    assert (settled.prompt_tokens, settled.completion_tokens, settled.cached_tokens) == (7, 11, 2)
    assert (settled.outcome, settled.variant, settled.error) == (Outcome.SUCCEEDED, "AllTraffic", None)
    assert (settled.queue_ms, settled.first_token_ms, settled.total_ms) == (3, 40, 90)
    assert (settled.key_id, settled.owner, settled.team) == ("key-1", "ada", "compilers")
    assert settled.expires_at == int(NOON.timestamp()) + 400 * 86_400


def test_a_second_claim_of_the_same_request_is_refused(ledger: DynamoUsageLedger) -> None:
    reservation, _ = numbered("claimed-twice")
    ledger.reserve(reservation).confirm()
    with pytest.raises(DuplicateRequestError):
        ledger.reserve(reservation).confirm()


def test_a_second_claim_settles_nothing_of_the_first_ones(client: DynamoDBClient, ledger: DynamoUsageLedger) -> None:
    reservation, record = numbered("settled-by-its-owner")
    first = ledger.reserve(reservation)
    first.confirm()
    second = ledger.reserve(reservation)
    second.settle(replace(record, usage=Usage(999, 999)))
    first.settle(record)

    assert LedgerReader(client, "UsageTable").settled("settled-by-its-owner").completion_tokens == 11


def test_a_claim_repeated_by_the_sdk_after_a_lost_reply_is_its_own(client: DynamoDBClient) -> None:
    """The first write lands and its reply is lost; the SDK sends the same bytes again."""
    sent: list[object] = []

    def lose_first_reply(response: object, **_: object) -> Any:
        """A delay in seconds asks botocore to send the request again."""
        sent.append(response)
        return 0.0 if len(sent) == 1 else None

    reservation, record = numbered("lost-reply")
    ledger = DynamoUsageLedger(client, "UsageTable", 400, ManualClock(now=NOON))
    client.meta.events.register_first("needs-retry.dynamodb.PutItem", lose_first_reply, unique_id="lost")
    try:
        claim = ledger.reserve(reservation)
        claim.confirm()
    finally:
        client.meta.events.unregister("needs-retry.dynamodb.PutItem", unique_id="lost")
    claim.settle(record)

    assert len(sent) == 2
    assert LedgerReader(client, "UsageTable").settled("lost-reply").completion_tokens == 11


def test_settling_twice_changes_nothing(client: DynamoDBClient, ledger: DynamoUsageLedger) -> None:
    reservation, record = numbered("settled-twice")
    claim = ledger.reserve(reservation)
    claim.settle(record)
    claim.settle(replace(record, usage=Usage(999, 999)))

    assert LedgerReader(client, "UsageTable").settled("settled-twice").completion_tokens == 11


def test_settling_a_claim_that_is_gone_is_an_error(client: DynamoDBClient, ledger: DynamoUsageLedger) -> None:
    reservation, record = numbered("claim-gone")
    claim = ledger.reserve(reservation)
    claim.confirm()
    client.delete_item(TableName="UsageTable", Key={"pk": {"S": "REQ#claim-gone"}, "sk": {"S": "RECORD"}})
    with pytest.raises(MeteringError):
        claim.settle(record)


def test_a_day_lists_its_records_and_what_is_not_settled(client: DynamoDBClient, ledger: DynamoUsageLedger) -> None:
    day = datetime(2031, 5, 17, 23, 59, tzinfo=UTC)
    for number in range(40):
        reservation, record = numbered(f"day-{number}")
        reservation = replace(reservation, created_at=day)
        claim = ledger.reserve(reservation)
        claim.confirm()
        if number % 2:
            claim.settle(replace(record, reservation=reservation))

    listed = list(day_claims(client, "UsageTable", day.date()))
    settled = {claim.request_id for claim in listed if isinstance(claim, RolledRecord)}
    assert settled == {f"day-{number}" for number in range(1, 40, 2)}
    assert {claim.request_id for claim in listed} - settled == {f"day-{number}" for number in range(0, 40, 2)}
    assert len(listed) == 40


@pytest.fixture
def nowhere() -> Iterator[DynamoDBClient]:
    settings = Config(retries={"total_max_attempts": 1}, connect_timeout=0.2)
    with closing(boto3.client("dynamodb", endpoint_url="http://127.0.0.1:9", config=settings)) as client:
        yield client


def test_a_registry_that_cannot_be_reached_is_an_error_of_its_own(nowhere: DynamoDBClient) -> None:
    with pytest.raises(BackendUnavailableError):
        DynamoRegistry(nowhere, "RegistryTable", ManualClock(), 30).principal("d1")


LIMITED = replace(RESERVATION, principal=replace(PRINCIPAL, limits=KeyLimits(parallel_requests=1)))


@pytest.mark.parametrize(
    ("fail_open", "reservation", "served"),
    [
        (FailOpen.NOBODY, RESERVATION, False),
        (FailOpen.NOBODY, LIMITED, False),
        (FailOpen.UNLIMITED, RESERVATION, True),
        (FailOpen.UNLIMITED, LIMITED, False),
        (FailOpen.EVERYBODY, RESERVATION, True),
        (FailOpen.EVERYBODY, LIMITED, True),
    ],
)
def test_who_is_served_while_the_usage_table_cannot_be_reached(
    nowhere: DynamoDBClient, fail_open: FailOpen, reservation: Reservation, served: bool
) -> None:
    ledger = DynamoUsageLedger(nowhere, "UsageTable", 400, ManualClock(), fail_open)
    if served:
        claim = ledger.reserve(reservation)
        claim.confirm()
        with pytest.raises(MeteringError):  # whoever settles must know that the record is not written
            claim.settle(RECORD)
    else:
        with pytest.raises(MeteringError):
            ledger.reserve(reservation).confirm()
