"""What a request costs in DynamoDB: HTTP requests, write and read units, and the roll-up behind the table's stream."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench_models import KEY, LIMITED_KEY
from buffered import Context, proxy_event
from dynamodb_traffic import Call, CountingProxy, listed, totals
from figures import Effort, Grid, Section
from processes import called, silenced

TOKENS = 16
ROLLED = (1, 10)


def measure(_: Effort) -> Section:
    """Counts, which no machine changes: once is enough."""
    with called() as urls, CountingProxy(urls.dynamodb) as proxy, silenced():
        os.environ |= {**urls.variables, "AWS_ENDPOINT_URL_DYNAMODB": proxy.url}
        seen = _requests(proxy)
        for count in ROLLED:
            seen[f"roll-up of {count} record{'s' if count > 1 else ''}"] = _rolled(proxy, count)
    rows = []
    for name, calls in seen.items():
        requests, written, read = totals(calls)
        rows.append((name, listed(calls), str(requests), f"{written:g}", f"{read:g}"))
    columns = ("what", "operations", "HTTP requests", "write units", "read units")
    note = (
        f"Prompt and answer have no part in it; {TOKENS} tokens. Units are AWS's rule over the items' own sizes. "
        "A key with limits pays more the more it has in progress; a roll-up shares its additions among its records."
    )
    return Section(
        "dynamodb",
        (Grid("DynamoDB, per request", columns, tuple(rows), note),),
        {
            name: dict(zip(("requests", "write_units", "read_units"), totals(calls), strict=True))
            for name, calls in seen.items()
        },
    )


def _requests(proxy: CountingProxy) -> dict[str, list[Call]]:
    from mangum import Mangum  # noqa: PLC0415 - the clients read the environment

    from completions.bootstrap import build_parts, openai_completions_app  # noqa: PLC0415

    seen: dict[str, list[Call]] = {}
    for name, key in (("key without limits", KEY), ("key with four limits", LIMITED_KEY)):
        for form in ("buffered", "streamed"):
            handler: Any = Mangum(openai_completions_app(build_parts()), lifespan="off")
            for state in ("cold", "warm"):
                event = proxy_event(key, TOKENS, stream=form == "streamed")
                event["requestContext"]["requestId"] = f"{name}-{form}-{state}"
                proxy.taken()
                reply = handler(event, Context())
                assert reply["statusCode"] == 200, reply
                seen[f"{form}, {name}, {state}"] = proxy.taken()
    return seen


def _rolled(proxy: CountingProxy, count: int) -> list[Call]:
    """The latest records of one key, as the stream would bring them together."""
    from completions.clients import SystemClock, build_dynamodb_client  # noqa: PLC0415
    from completions.dynamodb_json import deserialized  # noqa: PLC0415
    from completions.metering.rollup_items import RolledRecord  # noqa: PLC0415
    from completions.metering.rollups import RollUps  # noqa: PLC0415

    client = build_dynamodb_client()
    record = _a_record(client.scan(TableName="UsageTable")["Items"])
    copies = [{**record, "pk": {"S": f"REQ#copy-{count}-{number}"}} for number in range(count)]
    for item in copies:
        client.put_item(TableName="UsageTable", Item=item)
    proxy.taken()
    failed = RollUps(client, "UsageTable", SystemClock()).add(
        RolledRecord.model_validate(deserialized(item)) for item in copies
    )
    assert not failed, failed
    return proxy.taken()


def _a_record(items: Sequence[Any]) -> Any:
    """One that no roll-up has yet."""
    records = (item for item in items if item["sk"] == {"S": "RECORD"} and item["state"] == {"S": "SETTLED"})
    return next(item for item in records if not item["pk"]["S"].startswith("REQ#copy"))
