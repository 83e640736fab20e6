"""The marks of what was sent, in DynamoDB (moto's)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from completions.domain.errors import BackendUnavailableError
from completions.domain.events import RetryLaterError
from completions.stores.deliveries import DynamoDeliveryLog
from dynamodb_local import new_table
from fakes import ManualClock
from moto_services import moto_services


class Bench:
    """Two workers with one clock over one table."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.table = new_table(client, "PipelineTable")
        self.clock = ManualClock()
        self.one, self.two = (DynamoDeliveryLog(client, self.table, 30, self.clock) for _ in range(2))

    def item(self) -> dict[str, Any]:
        (item,) = self.client.scan(TableName=self.table)["Items"]
        found: dict[str, Any] = item
        return found


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with moto_services("eu-south-2") as make:
        yield make("dynamodb")


@pytest.fixture
def bench(client: Any) -> Bench:
    return Bench(client)


def test_what_was_sent_is_not_begun_again(bench: Bench) -> None:
    assert not bench.one.delivered("a")
    assert bench.one.begin("a") is not None
    assert not bench.two.delivered("a")
    bench.one.finish("a")
    assert bench.two.delivered("a")
    assert bench.two.begin("a") is None
    assert not bench.two.delivered("b")


def test_a_worker_waits_for_the_others_lease(bench: Bench) -> None:
    bench.one.begin("a")
    bench.clock.advance(45)
    with pytest.raises(RetryLaterError) as raised:
        bench.two.begin("a")
    assert raised.value.seconds == 15
    bench.clock.advance(14)
    with pytest.raises(RetryLaterError):
        bench.two.begin("a")


def test_after_the_lease_the_other_has_died(bench: Bench) -> None:
    first = bench.one.begin("a")
    bench.clock.advance(60.001)
    second = bench.two.begin("a")
    assert second not in (None, first)


def test_what_was_given_up_is_begun_at_once(bench: Bench) -> None:
    token = bench.one.begin("a")
    assert token is not None
    bench.one.give_up("a", token)
    assert bench.two.begin("a") is not None


def test_nobody_gives_up_for_another_nor_what_was_sent(bench: Bench) -> None:
    token = bench.one.begin("a")
    assert token is not None
    bench.two.give_up("a", "another token")
    with pytest.raises(RetryLaterError):
        bench.two.begin("a")
    bench.one.finish("a")
    bench.one.give_up("a", token)
    assert bench.one.delivered("a")


def test_a_put_whose_reply_was_lost_is_ones_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("completions.stores.deliveries.uuid4", lambda: "token")
    bench.one.begin("a")
    assert bench.one.begin("a") == "token"  # as the SDK repeats it


def test_a_mark_ends_with_the_retention(bench: Bench) -> None:
    bench.one.begin("a")
    bench.one.finish("a")
    item = bench.item()
    assert (item["pk"], item["sk"], item["state"]) == ({"S": "DELIVERY#a"}, {"S": "DELIVERY"}, {"S": "delivered"})
    assert int(item["expires_at"]["N"]) == int(bench.clock.now().timestamp()) + 30 * 86_400


@pytest.mark.parametrize("step", ["delivered", "begin", "finish"])
def test_a_table_that_is_not_there_is_a_service_error(client: Any, step: str) -> None:
    log = DynamoDeliveryLog(client, "nowhere", 30, ManualClock())
    with pytest.raises(BackendUnavailableError) as raised:
        getattr(log, step)("a")
    assert raised.value.detail == "ResourceNotFoundException"
