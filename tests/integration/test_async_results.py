"""Messages to an asynchronous endpoint: handed in by one function, answered by another, on the books throughout.

One long file: all of it turns on one subject and shares its builders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import boto3
import pytest

from completions.clients import SystemClock
from completions.domain.catalog import ModelPrice, ModelRoute
from completions.domain.deliveries import PlaceKind, ReplyPlace
from completions.domain.events import EventRequest, RetryLaterError
from completions.domain.limits import KeyLimits
from completions.domain.metering import Outcome, Principal
from completions.domain.submissions import Pending
from completions.metering.sweep import UsageSweeper
from completions.pipeline_bootstrap import PipelineClients, build_replying
from completions.pipelines.async_results import AsyncResults, UndeliveredError
from completions.pipelines.messages import MessageRequest
from completions.registry.dynamodb import put_key, put_model
from completions.settings import PipelineSettings
from completions.stores.pending import DynamoPendingStore
from completions.web.auth import secret_digest
from completions_cli.local.async_inference import AsyncInference
from completions_cli.local.faults import Fault, Refusal
from completions_cli.local.stack import LocalStack
from dynamodb_local import new_table
from ledger_reader import LedgerReader
from metered import AMPLE

ENDPOINT = "async-results"
BUCKET, OUTPUT = "async-pipeline", "async-answers"
LIMITED, UNLIMITED = Principal("limited", "ada", limits=KeyLimits(**AMPLE)), Principal("unlimited", "ada")
PRICE = ModelPrice("2026-11", 100, 10, 200)
BODY = {"model": ENDPOINT, "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
SOON, LATER = Fault(delay_ms=400), Fault(delay_ms=2_500)
NEVER = Fault(delay_ms=60_000, calls=None)


class ShiftedClock(SystemClock):
    """The machine's own time, and some more."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead


@dataclass(eq=False)
class Bench:
    """The two functions' use cases, over moto and the SageMaker stand-in."""

    stack: LocalStack
    dynamodb: Any
    s3: Any
    settings: PipelineSettings
    clock: ShiftedClock = field(default_factory=ShiftedClock)

    def __post_init__(self) -> None:
        clients = PipelineClients(self.dynamodb, self.s3, self.clock)
        self.replying, submissions = build_replying(self.settings, clients, lambda: boto3.client("sqs"))
        self.results = AsyncResults(submissions, self.replying, self.clock)
        self.pending = DynamoPendingStore(self.dynamodb, self.settings.pipeline_table, self.s3, BUCKET)
        self.ledger = LedgerReader(self.dynamodb, self.settings.usage_table)

    def sweep(self) -> None:
        keys = [LIMITED.key_id]
        table = self.settings.usage_table
        UsageSweeper(self.dynamodb, table, 400, self.clock, limited_keys=lambda: keys).sweep(everything=True)

    def reply(self, name: str) -> dict[str, Any] | None:
        """What was put under the request's name; taken away, so that a second one shows."""
        try:
            found = self.s3.get_object(Bucket=BUCKET, Key=f"answers/{name}.json")["Body"].read()
        except self.s3.exceptions.NoSuchKey:
            return None
        self.s3.delete_object(Bucket=BUCKET, Key=f"answers/{name}.json")
        reply: dict[str, Any] = json.loads(found)
        return reply

    def outcome_is_there(self, name: str) -> Pending:
        """The expectation, once its answer or its failure is in the bucket."""
        pending = self.pending.by_record(name)
        assert pending is not None
        assert pending.submission is not None
        for _ in range(100):
            for place in (pending.submission.ticket.answer, pending.submission.ticket.failure):
                if place is not None and self.s3.list_objects_v2(
                    Bucket=OUTPUT, Prefix=place.removeprefix(f"s3://{OUTPUT}/")
                ).get("KeyCount"):
                    return pending
            time.sleep(0.05)
        raise AssertionError("the stand-in has not answered")

    def forget(self) -> None:
        """Nothing is expected any more."""
        table = self.settings.pipeline_table
        for item in self.dynamodb.scan(TableName=table)["Items"]:
            if item["pk"]["S"].startswith("ASYNC"):
                self.dynamodb.delete_item(TableName=table, Key={"pk": item["pk"], "sk": item["sk"]})

    def open_requests(self) -> int:
        item = self.dynamodb.get_item(
            TableName=self.settings.usage_table,
            Key={"pk": {"S": f"LIMITS#{LIMITED.key_id}"}, "sk": {"S": "LIMITS"}},
        ).get("Item", {})
        return int(item.get("parallel_requests#", {"N": "0"})["N"])


def message(name: str, key: Principal = LIMITED, **fields: Any) -> MessageRequest:
    event = EventRequest(name, key.key_id, "/v1/completions", json.dumps({**BODY, **fields}).encode())
    return MessageRequest(event, name, ReplyPlace(PlaceKind.OBJECT, f"s3://{BUCKET}/answers/"), "line-1")


def told_by_sns(name: str) -> Mapping[str, Any]:
    notification = {"invocationStatus": "Completed", "inferenceId": name, "eventSource": "aws:sagemaker"}
    return {"Records": [{"EventSource": "aws:sns", "Sns": {"Message": json.dumps(notification)}}]}


def told_by_s3(uri: str) -> Mapping[str, Any]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    detail = {"bucket": {"name": bucket}, "object": {"key": key, "size": 1}}
    return {"source": "aws.s3", "detail-type": "Object Created", "detail": detail}


TIME = {"source": "aws.scheduler", "detail-type": "Scheduled Event"}


@pytest.fixture(scope="module")
def module(stack: LocalStack) -> Iterator[Bench]:
    url = stack.environment["AWS_ENDPOINT_URL_DYNAMODB"]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as cleanup:
        patch.setenv("AWS_ENDPOINT_URL_S3", url)
        patch.setenv("AWS_ENDPOINT_URL_SQS", url)
        dynamodb, s3 = boto3.client("dynamodb", endpoint_url=url), boto3.client("s3", endpoint_url=url)
        cleanup.callback(dynamodb.close)
        cleanup.callback(s3.close)
        for bucket in (BUCKET, OUTPUT):
            s3.create_bucket(Bucket=bucket)
        settings = PipelineSettings(
            registry_table=new_table(dynamodb, "RegistryTable"),
            usage_table=new_table(dynamodb),
            pipeline_table=new_table(dynamodb, "PipelineTable"),
            pipeline_bucket=BUCKET,
            upstream_attempts=1,
        )
        for key in (LIMITED, UNLIMITED):
            put_key(dynamodb, settings.registry_table, secret_digest(f"sk-{key.key_id}"), key)
        route = ModelRoute(ENDPOINT, ENDPOINT, "vllm", 8192, 1_764_547_200, asynchronous=True, price=PRICE)
        put_model(dynamodb, settings.registry_table, route)
        queue = AsyncInference(s3, OUTPUT)
        cleanup.callback(queue.stop)
        stack.sagemaker.containers[ENDPOINT] = stack.sagemaker.containers["demo-vllm"]
        stack.sagemaker.queues[ENDPOINT] = queue
        yield Bench(stack, dynamodb, s3, settings)
        del stack.sagemaker.queues[ENDPOINT], stack.sagemaker.containers[ENDPOINT]


@pytest.fixture
def bench(module: Bench) -> Iterator[Bench]:
    module.stack.sagemaker.call_count[ENDPOINT] = 0
    yield module
    module.clock.ahead = timedelta()
    module.forget()
    module.stack.sagemaker.faults.replace(ENDPOINT, [])


def script(bench: Bench, *faults: Fault) -> None:
    bench.stack.sagemaker.faults.replace(ENDPOINT, list(faults))


@pytest.mark.parametrize("key", [LIMITED, UNLIMITED], ids=["limited", "unlimited"])
@pytest.mark.parametrize("teller", ["sns", "s3", "time"])
def test_whoever_tells_of_the_end_first_has_the_reply_sent_and_nobody_twice(
    bench: Bench, teller: str, key: Principal
) -> None:
    name = f"msg-{teller}-{key.key_id}"
    script(bench, SOON)

    bench.replying.reply(message(name, key), None)

    assert bench.reply(name) is None
    held = bench.ledger.raw(name)
    assert held is not None
    assert held["state"] == "RESERVED"
    pending = bench.outcome_is_there(name)
    assert pending.submission is not None
    if teller == "time":
        bench.clock.ahead = timedelta(minutes=70)  # neither word came
    ways = {"sns": told_by_sns(name), "s3": told_by_s3(pending.submission.ticket.answer), "time": TIME}
    assert bench.results.handle(ways.pop(teller)) == 1
    for other in ways.values():
        assert bench.results.handle(other) == 0

    reply = bench.reply(name)
    assert reply is not None
    assert (reply["status"], reply["custom_id"], reply["model"]) == (200, "line-1", ENDPOINT)
    usage = reply["usage"]
    assert usage["completion_tokens"] == 8
    assert reply["body"]["usage"]["total_tokens"] == usage["total_tokens"]
    record = bench.ledger.settled(name)
    assert (record.outcome, record.completion_tokens) == (Outcome.SUCCEEDED, 8)
    assert record.nanos == reply["cost_nanos"] == usage["prompt_tokens"] * 100 + 8 * 200
    assert bench.stack.sagemaker.call_count[ENDPOINT] == 1
    assert bench.open_requests() == 0
    assert bench.pending.by_record(name) is None


def test_a_message_that_comes_again_is_not_handed_in_again(bench: Bench) -> None:
    script(bench, LATER)
    asked = message("msg-again")
    bench.replying.reply(asked, None)
    bench.replying.reply(asked, None)
    assert bench.reply("msg-again") is None

    bench.outcome_is_there("msg-again")
    bench.replying.reply(asked, None)  # as good as any other word of it
    assert bench.reply("msg-again") is not None
    bench.replying.reply(asked, None)
    assert bench.results.handle(told_by_sns("msg-again")) == 0

    assert bench.reply("msg-again") is None
    assert bench.stack.sagemaker.call_count[ENDPOINT] == 1


def test_a_failure_is_a_reply_that_costs_nothing(bench: Bench) -> None:
    script(bench, Fault(delay_ms=200, refusal=Refusal(kind="model_error", status=500, message="CUDA out of memory")))
    bench.replying.reply(message("msg-failed"), None)
    bench.outcome_is_there("msg-failed")

    assert bench.results.handle(told_by_sns("msg-failed")) == 1

    reply = bench.reply("msg-failed")
    assert reply is not None
    assert reply["status"] == 500
    assert "CUDA" not in json.dumps(reply)
    record = bench.ledger.settled("msg-failed")
    assert (record.outcome, record.nanos, record.error) == (Outcome.FAILED, 0, "BackendError")
    assert bench.open_requests() == 0


def test_what_does_not_come_is_given_up_by_its_time_and_not_before(bench: Bench) -> None:
    script(bench, NEVER)
    bench.replying.reply(message("msg-late"), None)
    bench.replying.reply(message("msg-late-too", UNLIMITED), None)

    bench.clock.ahead = timedelta(minutes=30)  # the sweeper takes what is older than 16 for lost
    bench.sweep()
    assert bench.results.handle(TIME) == 0
    for name in ("msg-late", "msg-late-too"):
        held = bench.ledger.raw(name)
        assert held is not None
        assert held["state"] == "RESERVED"
    assert bench.open_requests() == 1

    bench.clock.ahead = timedelta(minutes=66)
    assert bench.results.handle(TIME) == 2

    for name in ("msg-late", "msg-late-too"):
        reply = bench.reply(name)
        assert reply is not None
        assert (reply["status"], reply["error"]["type"]) == (504, "BackendTimeoutError")
        assert bench.ledger.settled(name).outcome is Outcome.FAILED
        assert bench.results.handle(told_by_sns(name)) == 0
    assert bench.open_requests() == 0


def test_a_function_that_dies_before_the_endpoint_has_it_leaves_a_message_that_is_tried_again(bench: Bench) -> None:
    name = "msg-died"
    bench.pending.expect(Pending(name, bench.clock.now() + timedelta(hours=1), b"{}"))
    script(bench, SOON)

    bench.replying.reply(message(name), None)  # the queue delivers it again

    bench.outcome_is_there(name)
    assert bench.results.handle(told_by_sns(name)) == 1
    assert bench.reply(name) is not None


def test_one_that_dies_with_the_claim_is_given_up_by_its_time_and_the_message_tried_again(bench: Bench) -> None:
    name = "msg-died-late"
    script(bench, SOON, SOON)
    bench.replying.reply(message(name), None)
    bench.outcome_is_there(name)
    bench.dynamodb.update_item(  # as if it had died before it could note where the end will be
        TableName=bench.settings.pipeline_table,
        Key={"pk": {"S": f"ASYNC#{name}"}, "sk": {"S": "ASYNC"}},
        UpdateExpression="REMOVE submission",
    )
    with pytest.raises(RetryLaterError):
        bench.replying.reply(message(name), None)

    bench.clock.ahead = timedelta(minutes=66)
    assert bench.results.handle(TIME) == 0
    assert bench.ledger.settled(name).outcome is Outcome.FAILED
    bench.clock.ahead = timedelta()
    bench.replying.reply(message(name), None)
    bench.outcome_is_there(f"{name}-2")
    assert bench.results.handle(told_by_sns(f"{name}-2")) == 1

    reply = bench.reply(name)
    assert reply is not None
    assert reply["status"] == 200
    assert bench.ledger.settled(f"{name}-2").outcome is Outcome.SUCCEEDED


def test_what_nobody_here_expects_is_somebody_elses(bench: Bench) -> None:
    assert bench.results.handle(told_by_sns("a-call-that-waits-for-itself")) == 0
    assert bench.results.handle(told_by_s3(f"s3://{OUTPUT}/unknown.out")) == 0


def test_a_refused_message_is_answered_at_once(bench: Bench) -> None:
    bench.replying.reply(message("msg-refused", n=0), None)

    reply = bench.reply("msg-refused")
    assert reply is not None
    assert reply["status"] == 400
    assert bench.stack.sagemaker.call_count[ENDPOINT] == 0


def test_other_models_are_still_answered_at_once(bench: Bench, stack: LocalStack) -> None:
    route = ModelRoute("at-once", "demo-vllm", "vllm", 8192, 1_764_547_200)
    put_model(bench.dynamodb, bench.settings.registry_table, route)
    asked = message("msg-at-once", model="at-once")

    bench.replying.reply(replace(asked, custom_id=None), None)

    reply = bench.reply("msg-at-once")
    assert reply is not None
    assert (reply["status"], reply["model"]) == (200, "at-once")


# Two who ask under one name


def test_two_who_ask_the_same_under_one_name_both_get_the_one_answer(bench: Bench) -> None:
    script(bench, SOON)
    first = message("msg-twice")
    second = replace(first, delivery_name="msg-twice-elsewhere")
    bench.replying.reply(first, None)
    with pytest.raises(RetryLaterError):
        bench.replying.reply(second, None)

    bench.outcome_is_there("msg-twice")
    assert bench.results.handle(told_by_sns("msg-twice")) == 1
    bench.replying.reply(second, None)

    for name in ("msg-twice", "msg-twice-elsewhere"):
        reply = bench.reply(name)
        assert reply is not None
        assert (reply["status"], reply["request_id"]) == (200, name)
    assert bench.stack.sagemaker.call_count[ENDPOINT] == 1


def test_who_asks_another_thing_under_a_name_does_not_take_the_answer_away(bench: Bench) -> None:
    script(bench, LATER)
    bench.replying.reply(message("msg-taken"), None)
    other = replace(message("msg-taken", prompt="def f("), delivery_name="msg-taken-elsewhere")
    bench.replying.reply(other, None)

    refusal = bench.reply("msg-taken-elsewhere")
    assert refusal is not None
    assert refusal["status"] == 400
    bench.outcome_is_there("msg-taken")
    assert bench.results.handle(told_by_sns("msg-taken")) == 1
    reply = bench.reply("msg-taken")
    assert reply is not None
    assert reply["status"] == 200


# What goes wrong with one keeps nobody else waiting


def test_a_reply_that_cannot_be_sent_holds_up_no_other(bench: Bench) -> None:
    script(bench, NEVER)
    nowhere = replace(message("msg-stuck"), place=ReplyPlace(PlaceKind.OBJECT, "s3://no-such-bucket-here/"))
    bench.replying.reply(nowhere, None)
    bench.clock.ahead = timedelta(seconds=5)
    bench.replying.reply(message("msg-behind"), None)

    bench.clock.ahead = timedelta(minutes=66)
    with pytest.raises(UndeliveredError):
        bench.results.handle(TIME)
    assert bench.reply("msg-behind") is not None
    assert bench.results.handle(TIME) == 0  # it is not tried at once again
    bench.clock.ahead = timedelta(minutes=82)
    with pytest.raises(UndeliveredError):
        bench.results.handle(TIME)

    bench.s3.create_bucket(Bucket="no-such-bucket-here")
    bench.clock.ahead = timedelta(minutes=98)
    assert bench.results.handle(TIME) == 1
    assert bench.pending.by_record("msg-stuck") is None


def test_a_message_that_is_gone_ends_its_claim_and_holds_up_no_other(bench: Bench) -> None:
    script(bench, NEVER)
    bench.replying.reply(message("msg-gone"), None)
    for key in bench.s3.list_objects_v2(Bucket=BUCKET, Prefix="pending/msg-gone")["Contents"]:
        bench.s3.delete_object(Bucket=BUCKET, Key=key["Key"])
    bench.replying.reply(message("msg-there"), None)
    assert bench.results.handle(told_by_sns("msg-gone")) == 0

    bench.clock.ahead = timedelta(minutes=66)
    assert bench.results.handle(TIME) == 1
    assert bench.reply("msg-there") is not None
    assert bench.ledger.settled("msg-gone").outcome is Outcome.FAILED
    assert bench.pending.by_record("msg-gone") is None


def test_what_is_overdue_is_left_to_the_next_run_where_there_is_no_time(bench: Bench) -> None:
    script(bench, NEVER)
    bench.replying.reply(message("msg-next-run"), None)
    bench.clock.ahead = timedelta(minutes=66)
    assert bench.results.handle(TIME, deadline=time.monotonic()) == 0
    assert bench.reply("msg-next-run") is None
    assert bench.results.handle(TIME, deadline=time.monotonic() + 60) == 1
    assert bench.reply("msg-next-run") is not None


# One answer, one payment


def test_a_busy_container_is_a_failure_at_once_and_not_in_an_hour(bench: Bench) -> None:
    busy = json.dumps({"object": "error", "message": "no slot", "code": 503})
    script(bench, Fault(delay_ms=200, refusal=Refusal(kind="model_error", status=503, message=busy)))
    bench.replying.reply(message("msg-busy"), None)
    bench.outcome_is_there("msg-busy")
    assert bench.results.handle(told_by_sns("msg-busy")) == 1
    reply = bench.reply("msg-busy")
    assert reply is not None
    assert reply["status"] == 503
    assert bench.ledger.settled("msg-busy").nanos == 0


def test_an_answer_that_comes_after_the_last_word_changes_nothing(bench: Bench) -> None:
    script(bench, LATER)
    nowhere = replace(message("msg-after"), place=ReplyPlace(PlaceKind.OBJECT, "s3://no-bucket-yet/"))
    bench.replying.reply(nowhere, None)
    bench.clock.ahead = timedelta(minutes=66)
    with pytest.raises(UndeliveredError):
        bench.results.handle(TIME)
    bench.outcome_is_there("msg-after")
    bench.s3.create_bucket(Bucket="no-bucket-yet")

    assert bench.results.handle(told_by_sns("msg-after")) == 1
    reply = json.loads(bench.s3.get_object(Bucket="no-bucket-yet", Key="msg-after.json")["Body"].read())
    assert reply["status"] == 504
    record = bench.ledger.settled("msg-after")
    assert (record.outcome, record.nanos) == (Outcome.FAILED, 0)


def test_what_the_sweeper_took_for_lost_is_not_handed_in_again_while_it_is_expected(bench: Bench) -> None:
    script(bench, LATER)
    asked = message("msg-swept", UNLIMITED)
    bench.replying.reply(asked, None)
    bench.clock.ahead = timedelta(minutes=75)  # nobody has looked what is overdue
    bench.sweep()
    assert bench.ledger.settled("msg-swept").outcome is Outcome.LOST
    bench.replying.reply(asked, None)
    assert bench.stack.sagemaker.call_count[ENDPOINT] == 1

    bench.outcome_is_there("msg-swept")
    assert bench.results.handle(told_by_sns("msg-swept")) == 1
    record = bench.ledger.settled("msg-swept")
    assert (record.outcome, record.completion_tokens) == (Outcome.SUCCEEDED, 8)
    assert bench.ledger.raw("msg-swept-2") is None


def test_what_is_expected_anew_is_overdue_when_that_is(bench: Bench) -> None:
    now = bench.clock.now()
    for hours in (1, 2):  # a key without room has its message come again and again
        bench.pending.expect(Pending("msg-anew", now + timedelta(hours=hours), b"{}"))
    bench.clock.ahead = timedelta(minutes=66)
    assert bench.results.handle(TIME) == 0
    assert bench.pending.by_record("msg-anew") is not None
    bench.clock.ahead = timedelta(minutes=126)
    assert bench.results.handle(TIME) == 0
    assert bench.pending.by_record("msg-anew") is None


def test_a_message_that_comes_again_when_all_is_done_leaves_nothing_behind(bench: Bench) -> None:
    script(bench, SOON)
    asked = message("msg-done")
    bench.replying.reply(asked, None)
    bench.outcome_is_there("msg-done")
    assert bench.results.handle(told_by_sns("msg-done")) == 1
    bench.dynamodb.delete_item(  # as if this delivery had looked before the reply was sent
        TableName=bench.settings.pipeline_table, Key={"pk": {"S": "DELIVERY#msg-done"}, "sk": {"S": "DELIVERY"}}
    )
    bench.replying.reply(asked, None)
    assert bench.pending.by_record("msg-done") is None
    assert not bench.s3.list_objects_v2(Bucket=BUCKET, Prefix="pending/msg-done").get("KeyCount")
