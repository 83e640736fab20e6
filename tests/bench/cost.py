"""Dollars for a million requests, from what the other sections measured and the dated list prices.

A classic environment is paid for as long as it waits, so its price is the generation's time and what the service adds.
A managed instance is paid by the hour, so its price is how many requests it carries: bounded by the places that its
environments have and by its processors, at the share of both that is planned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prices
from figures import Grid, Section

GENERATION_SECONDS = (0.5, 2.0, 10.0)
TOKENS_PER_SECOND = 50
MEMORY_GB = 0.5
LAMBDA_CPUS = 512 / 1769
"""Of one processor that a function of 512 MB has: Lambda gives a whole one for 1,769 MB."""
ENVIRONMENT_PLACES = 64
ENVIRONMENTS_PER_CPU = 1
PLANNED_LOAD = 0.6
ROLLUP_SECONDS, ROLLUP_BATCH = 0.1, 10
FORMS = ("classic, streamed", "classic, buffered", "managed instances")


def section(results: Mapping[str, Any]) -> Section:
    """From the JSON of the sections. Raises ``KeyError`` where one of them has not been measured."""
    buffered = results["buffered"]["data"]["cpu_ms"]["metered"]["median"] / 1000
    streams = results["streams"]["data"]["uvicorn"]["metered, 64 streams"]
    event = streams["paced_event_cpu_us"] / 1e6
    units = results["dynamodb"]["data"]
    writes = (
        units["streamed, key without limits, warm"]["write_units"] + units["roll-up of 10 records"]["write_units"] / 10
    )
    tables = writes * prices.WRITE_UNITS_MILLION + _read_units(units) * prices.READ_UNITS_MILLION
    rows, data = [], {}
    for form in FORMS:
        for seconds in GENERATION_SECONDS:
            events = seconds * TOKENS_PER_SECOND
            cpu = buffered if form == "classic, buffered" else events * event
            waiting = _managed(seconds, cpu) if form == "managed instances" else _classic(form, seconds, buffered, cpu)
            parts = {
                "waiting": waiting,
                "calls": prices.LAMBDA_MILLION_CALLS,
                "gateway": prices.GATEWAY_MILLION_CALLS,
                "tables": tables,
                "roll_up": _roll_up(),
            }
            data[f"{form}, {seconds:g} s"] = {**parts, "total": sum(parts.values())}
            rows.append((form, f"{seconds:g}", *(f"{value:.2f}" for value in (*parts.values(), sum(parts.values())))))
    columns = (
        "form",
        "generation, s",
        "waiting",
        "calls",
        "API Gateway",
        "tables",
        "roll-up",
        "total, $ a million requests",
    )
    note = (
        f"{prices.REGION}, list prices as noted on {prices.DATE}, without the model. {MEMORY_GB:g} GB of arm64, "
        f"{LAMBDA_CPUS:.2f} of a processor; {TOKENS_PER_SECOND} tokens a second; CPU as measured here. Managed: "
        f"{prices.INSTANCE} at {PLANNED_LOAD:.0%} of its places and processors, the "
        f"{prices.MANAGED_LEAST_INSTANCES} instances that are there in any case "
        f"(${_hour() * prices.MANAGED_LEAST_INSTANCES:.2f} an hour) being busy. Roll-ups by {ROLLUP_BATCH}, assumed to "
        f"take {ROLLUP_SECONDS:g} s."
    )
    return Section("cost", (Grid("Dollars for a million requests", columns, tuple(rows), note), _price_grid()), data)


def _read_units(units: Mapping[str, Any]) -> float:
    """A warm environment reads key and model again every half minute: one request in a hundred is taken as cold."""
    cold: float = units["streamed, key without limits, cold"]["read_units"]
    return cold / 100


def _classic(form: str, seconds: float, buffered: float, cpu: float) -> float:
    """What comes before and behind the generation is added; an event's CPU is spent while the model makes the next.

    Where the processor's share does not keep up with the model, the answer takes as long as the processor does.
    """
    ends = buffered / LAMBDA_CPUS
    streaming = 0.0 if form == "classic, buffered" else cpu / LAMBDA_CPUS
    return (max(seconds, streaming) + ends) * MEMORY_GB * prices.LAMBDA_GB_SECOND_ARM * 1e6


def _managed(seconds: float, cpu: float) -> float:
    places = ENVIRONMENT_PLACES * ENVIRONMENTS_PER_CPU * prices.INSTANCE_CPUS
    per_second = min(places / seconds, prices.INSTANCE_CPUS / cpu) * PLANNED_LOAD
    return _hour() / (per_second * 3600) * 1e6


def _hour() -> float:
    return prices.INSTANCE_HOUR * (1 + prices.MANAGED_SURCHARGE)


def _roll_up() -> float:
    each = ROLLUP_SECONDS * MEMORY_GB * prices.LAMBDA_GB_SECOND_ARM * 1e6 + prices.LAMBDA_MILLION_CALLS
    return each / ROLLUP_BATCH


def _price_grid() -> Grid:
    return Grid("Prices used", ("what", "price"), tuple(prices.SOURCES.items()))
