"""The dashboard in a real browser: what it shows, what it says when it cannot, and what it never does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx2 as httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from browser import CHROMIUM, DRIVER, Browser, running_browser
from completions_cli.local.server import bind, serving
from served import Served
from usage_api import ADMIN, MEMBER, Caller, FakeUsageApi

HOSTILE = "<img src=x onerror=\"document.body.id='hacked'\">"
CALLERS = (
    Caller("qwen-32b", "key_a", "anna", "editors", 7, Decimal("0.0000012")),
    Caller("qwen-32b", "key_b", "farm", "ci", 3, Decimal("0.0000012")),
    Caller("llama-70b", "key_b", "farm", "ci", 2, Decimal("0.0000031")),
    Caller(HOSTILE, "key_c", HOSTILE, None, 4, Decimal("0.000000017")),
)
NONE = "\u2013"
DAY_END = 1_796_083_200  # 2026-12-01T00:00:00Z
LIMITS = (
    {
        "api_key_id": "key_a",
        "owner": HOSTILE,
        "team": "editors",
        "limits": [
            {"name": "tokens_per_day", "limit": 5000, "used": 1250, "remaining": 3750, "resets_at": DAY_END},
            {
                "name": "nanos_per_month",
                "limit": 250_000_000_000,
                "used": 231_500_000_001,
                "remaining": 18_499_999_999,
                "resets_at": DAY_END,
            },
        ],
    },
    {
        "api_key_id": "key_b",
        "owner": "farm",
        "team": None,
        "limits": [{"name": "parallel_requests", "limit": 8, "used": 6, "remaining": 2, "resets_at": None}],
    },
)
LATENCY = (
    {
        "model": "qwen-32b",
        "requests": 1234,
        "first_token_ms": {"p50": 120.4, "p95": 999.4, "p99": 1680.0},
        "total_ms": {"p50": 2700.0, "p95": 12345.0, "p99": None},
    },
    {"model": HOSTILE, "requests": 1, "first_token_ms": None, "total_ms": {"p50": 5, "p95": 5, "p99": 5}},
)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Chromium and its driver on PATH; in Debian: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture
def api() -> FakeUsageApi:
    return FakeUsageApi(CALLERS, LIMITS, LATENCY)


@pytest.fixture
def url(api: FakeUsageApi) -> Iterator[str]:
    with serving(api.app("/prod"), bind(0)) as base:
        yield f"{base}/prod/dashboard"


def test_a_page_that_is_used_has_no_complaint_and_asks_nobody_else(browser: Browser, url: str) -> None:
    browser.open(url, ADMIN)
    for name, value in (("range", "7d"), ("width", "1h"), ("group", "key"), ("range", "month"), ("refresh", "15")):
        browser.choose(name, value)
    requests = browser.requests()
    host = url.removesuffix("/prod/dashboard")
    assert browser.complaints() == []
    assert all(one.startswith((f"{host}/prod/", "data:image/svg+xml,")) for one in requests)
    assert any("/prod/v1/organization/costs?" in one for one in requests)
    assert not any(ADMIN in one for one in requests)


@pytest.mark.parametrize(("key", "words"), [("sk-wrong", "was not accepted"), (MEMBER, "an admin key is needed")])
def test_a_key_that_is_refused_is_told_so_and_forgotten(browser: Browser, url: str, key: str, words: str) -> None:
    browser.open(url)
    browser.sign_in(key)
    browser.until(lambda: words in browser.text("[role=alert]"))
    assert browser.driver.find_element(By.ID, "key").is_displayed()
    assert not browser.driver.find_element(By.ID, "board").is_displayed()
    assert browser.script("return sessionStorage.length") == 0


def test_a_key_that_no_header_can_carry_is_not_sent(browser: Browser, url: str, api: FakeUsageApi) -> None:
    browser.open(url)
    browser.sign_in("clé à moi")
    assert "without spaces" in browser.text("[role=alert]")
    assert api.asked == []


def test_the_key_is_kept_in_the_tab_alone_until_it_is_forgotten(browser: Browser, url: str) -> None:
    browser.open(url, ADMIN)
    assert browser.script("return Object.values(sessionStorage)") == [ADMIN]
    assert browser.script("return [localStorage.length, document.cookie, location.href.includes('sk-')]") == [
        0,
        "",
        False,
    ]
    assert ADMIN not in browser.driver.page_source
    browser.driver.refresh()
    browser.until(lambda: browser.text("#updated").startswith("As of"))

    browser.driver.find_element(By.ID, "forget").click()
    assert browser.script("return sessionStorage.length") == 0
    assert "qwen" not in browser.driver.page_source
    assert browser.driver.find_element(By.ID, "key").is_displayed()


def expected(api: FakeUsageApi, dimension: str, places: int) -> dict[str | None, tuple[int, Decimal]]:
    """Requests and dollars by name, from the callers themselves."""
    sums: dict[str | None, tuple[int, Decimal]] = {}
    for caller in api.callers:
        name = getattr(caller, dimension)
        requests = sum(caller.requests(place) for place in range(places))
        before = sums.get(name, (0, Decimal(0)))
        sums[name] = before[0] + requests, before[1] + requests * 16 * caller.price
    return sums


def count(number: int) -> str:
    return f"{number:,}"


def dollars(amount: Decimal) -> str:
    whole, _, rest = f"{amount:,.9f}".partition(".")
    return f"${whole}.{rest.rstrip('0').ljust(2, '0')}"


@pytest.mark.parametrize(
    ("group", "dimension"), [("model", "model"), ("key", "api_key_id"), ("owner", "user_id"), ("team", "project_id")]
)
@pytest.mark.parametrize(("span", "width", "places"), [("1h", "1m", 60), ("24h", "1h", 24), ("7d", "1h", 168)])
def test_the_figures_are_the_apis(
    browser: Browser, url: str, api: FakeUsageApi, group: str, dimension: str, span: str, width: str, places: int
) -> None:
    api.page_size = 50
    browser.open(f"{url}#range={span}&width={width}&group={group}", ADMIN)
    names = expected(api, dimension, places)
    rows = {row[0]: row[1:6] for row in browser.rows("#split")}
    requests, spend = (sum(column, start=type(column[0])()) for column in zip(*names.values(), strict=True))
    assert rows.pop("All") == [*map(count, (requests, requests * 11, requests * 2, requests * 5)), dollars(spend)]
    assert rows == {
        "(no team)" if name is None else name: [*map(count, (n, n * 11, n * 2, n * 5)), dollars(amount)]
        for name, (n, amount) in names.items()
    }
    assert browser.text("#total-requests") == count(requests)
    assert browser.text("#total-input") == count(requests * 11)
    assert browser.text("#total-output") == count(requests * 5)
    assert browser.driver.find_element(By.ID, "total-spend").get_attribute("title") == dollars(spend)


def test_each_chart_has_its_figures_as_a_table(browser: Browser, url: str, api: FakeUsageApi) -> None:
    browser.open(f"{url}#range=24h&group=key", ADMIN)
    busy = [place for place in range(24) if place % 3 != 2]
    tokens = browser.rows("#tokens-chart")
    spend = browser.rows("#spend-chart")
    assert len(tokens) == len(spend) == len(busy)
    for place, token_row, spend_row in zip(busy, tokens, spend, strict=True):
        assert token_row[-1] == count(16 * 16 * (place + 1))  # 16 requests of 11 + 5 tokens
        amount = sum((caller.requests(place) * 16 * caller.price for caller in CALLERS), Decimal(0))
        assert spend_row[-1] == dollars(amount)
    charts = browser.driver.find_elements(By.CSS_SELECTOR, "svg[role=img]")
    assert [str(chart.get_attribute("aria-label")).partition(",")[0] for chart in charts] == [
        "Spend over time by API key",
        "Tokens over time by API key",
    ]
    # a bar for each key in each bucket that has use
    assert len(charts[0].find_elements(By.CSS_SELECTOR, "rect[class^=f]")) == 3 * len(busy)


def test_use_without_a_price_is_no_spend(browser: Browser, url: str, api: FakeUsageApi) -> None:
    api.callers = [Caller("demo", "key_a", "anna", None, 1, Decimal(0))]
    browser.open(f"{url}#range=24h", ADMIN)
    assert browser.text("#spend-chart") == "No spend: the models that answered have no price."
    assert browser.rows("#split")[0][-2:] == ["$0.00", NONE]
    assert browser.text("#total-spend") == "$0"

    api.callers = []
    browser.driver.find_element(By.ID, "reload").click()
    browser.until(lambda: browser.text("#tokens-chart") == browser.text("#split") == "Nothing in this time.")


def test_the_bars_can_be_walked_with_the_keyboard(browser: Browser, url: str) -> None:
    browser.open(f"{url}#range=24h&group=team", ADMIN)
    chart = browser.driver.find_element(By.CSS_SELECTOR, "#tokens-chart svg")
    chart.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    tip = browser.text("#tokens-chart [role=status]")
    assert f"All\n{count(2 * 16 * 16)}" in tip
    chart.send_keys(Keys.ESCAPE)
    assert not browser.driver.find_element(By.CSS_SELECTOR, "#tokens-chart [role=status]").is_displayed()


def test_times_and_widths_are_asked_for_in_whole_buckets(browser: Browser, url: str, api: FakeUsageApi) -> None:
    before = time.time()
    browser.open(f"{url}#range=6h&width=1m", ADMIN)
    now = time.time()
    asked = [query for name, query in api.asked if name == "completions"]
    assert {(one["bucket_width"], one["group_by[]"], one["limit"]) for one in asked} == {("1m", "model", "1440")}
    start, end = int(asked[0]["start_time"]), int(asked[0]["end_time"])
    assert start % 60 == 0
    assert end - start == 6 * 3600
    assert before < end <= now + 60
    assert len(asked) == 36  # pages of ten buckets
    options = Select(browser.driver.find_element(By.ID, "width")).options
    assert [option.text for option in options] == ["1 minute", "1 hour"]

    browser.choose("range", "last-month")
    _, last = next(one for one in reversed(api.asked) if one[0] == "costs")
    dates = [time.gmtime(int(last[name])) for name in ("start_time", "end_time")]
    today = time.gmtime(now)
    assert (dates[1].tm_year, dates[1].tm_mon, dates[1].tm_mday, dates[1].tm_hour) == (*today[:2], 1, 0)
    assert (dates[0].tm_mday, dates[0].tm_hour, dates[0].tm_mon % 12) == (1, 0, (today.tm_mon - 1) % 12)
    assert "range=last-month" in browser.driver.current_url


def test_limits_show_what_is_used_and_left(browser: Browser, url: str) -> None:
    browser.open(url, ADMIN)
    assert browser.rows("#limits") == [
        ["key_a", HOSTILE, "editors", "Tokens per day", "1,250", "", "5,000", "3,750", "Dec 1, 00:00"],
        [
            "key_a",
            HOSTILE,
            "editors",
            "Spend per month",
            "$231.500000001",
            "",
            "$250.00",
            "$18.499999999",
            "Dec 1, 00:00",
        ],
        ["key_b", "farm", NONE, "Requests at a time", "6", "", "8", "2", NONE],
    ]
    meters = browser.driver.find_elements(By.CSS_SELECTOR, "#limits [role=meter]")
    assert [meter.get_attribute("aria-valuenow") for meter in meters] == ["25", "93", "75"]
    assert meters[0].get_attribute("aria-label") == "Tokens per day of key_a"


def test_latency_shows_the_percentiles_of_each_model(browser: Browser, url: str) -> None:
    browser.open(url, ADMIN)
    assert browser.rows("#latency") == [
        ["qwen-32b", "1,234", "", "120 ms", "999 ms", "1.68 s", "", "2.70 s", "12.3 s", NONE],
        [HOSTILE, "1", "", NONE, NONE, NONE, "", "5 ms", "5 ms", "5 ms"],
    ]


@pytest.mark.parametrize("group", ["model", "owner"])
def test_a_name_that_is_markup_stays_text(browser: Browser, url: str, group: str) -> None:
    browser.open(f"{url}#group={group}", ADMIN)
    browser.script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for chart in browser.driver.find_elements(By.CSS_SELECTOR, ".plot svg"):
        chart.send_keys(Keys.ARROW_RIGHT)
    assert browser.driver.find_elements(By.TAG_NAME, "img") == []
    assert browser.driver.find_element(By.TAG_NAME, "body").get_attribute("id") == ""
    for panel in ("#split", "#limits", "#latency", "#spend-chart", "#tokens-chart"):
        assert HOSTILE in browser.text(panel)
    assert browser.complaints() == []


def test_even_the_console_cannot_make_markup_of_text(browser: Browser, url: str) -> None:
    browser.open(url)
    refused = browser.script(
        "try { document.body.innerHTML = '<b>x</b>'; return null } catch (error) { return error.name }"
    )
    assert refused == "TypeError"


def test_a_part_that_fails_leaves_the_others(browser: Browser, url: str, api: FakeUsageApi) -> None:
    api.overrides["latency"] = 404
    api.overrides["limits"] = 503
    browser.open(url, ADMIN)
    assert browser.text("#latency") == "The gateway answered 404. It broke."
    assert browser.text("#limits") == "The gateway answered 503. It broke. Request request-17."
    assert "qwen-32b" in browser.text("#split")
    assert not browser.driver.find_element(By.CSS_SELECTOR, "[role=alert]").is_displayed()


def test_a_gateway_that_is_gone_is_said_and_the_last_figures_stay(browser: Browser, api: FakeUsageApi) -> None:
    with serving(api.app(), bind(0)) as base:
        browser.open(f"{base}/dashboard", ADMIN)
    browser.driver.find_element(By.ID, "reload").click()
    browser.until(lambda: "cannot be reached" in browser.text("[role=alert]"))
    assert "qwen-32b" in browser.text("#split")
    assert browser.script("return sessionStorage.length") == 1


def test_it_refreshes_by_itself(browser: Browser, url: str, api: FakeUsageApi) -> None:
    hurry = "const later = setTimeout; window.setTimeout = (work, ms) => later(work, ms / 100);"
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": hurry})
    try:
        browser.open(f"{url}#refresh=15", ADMIN)
        before = len(api.asked)
        browser.until(lambda: len(api.asked) > before + 8)
        browser.choose("refresh", "0")
        time.sleep(0.3)  # what was asked before the choice
        after = len(api.asked)
        time.sleep(0.5)
        assert len(api.asked) == after
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_it_follows_the_systems_colours_and_can_be_read_in_both(browser: Browser, url: str) -> None:
    browser.open(url, ADMIN)
    seen = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        back, ink, soft = browser.script(
            "const of = (selector, what) => getComputedStyle(document.querySelector(selector))[what];"
            "return [of('.card', 'backgroundColor'), of('body', 'color'), of('.hint', 'color')]"
        )
        assert contrast(ink, back) >= 7
        assert contrast(soft, back) >= 4.5  # WCAG 2.1, level AA
        seen.append(luminance(back))
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert seen[0] > 0.9
    assert seen[1] < 0.1


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2.1 defines it."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_narrow_window_scrolls_its_tables_and_not_the_page(browser: Browser, url: str) -> None:
    size = browser.driver.get_window_size()
    browser.driver.set_window_size(500, 900)
    try:
        browser.open(url, ADMIN)
        assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        browser.driver.set_window_size(size["width"], size["height"])


def test_against_the_real_service_the_figures_are_its_own(browser: Browser, served_stack: Served) -> None:
    body = {"model": "demo-vllm", "prompt": "import os\n", "max_tokens": 5}
    with httpx.Client(
        base_url=served_stack.base_url, headers={"Authorization": f"Bearer {served_stack.key}"}, timeout=30
    ) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        start = int(time.time()) // 86400 * 86400 - 6 * 86400

        def results(path: str, group: str) -> dict[str, dict[str, Any]]:
            query: dict[str, str | int] = {"start_time": start, "bucket_width": "1d", "group_by[]": group}
            buckets = client.get(f"/v1/organization/{path}", params=query).raise_for_status().json()["data"]
            return {result[group]: result for result in buckets[-1]["results"]}

        browser.open(f"{served_stack.base_url}/dashboard#range=7d&width=1d&refresh=0", served_stack.key)
        for _ in range(20):  # other tests' requests are still being added up
            browser.driver.find_element(By.ID, "reload").click()
            browser.until(lambda: not browser.script("return document.querySelector('#board').matches('.busy')"))
            usage, costs = results("usage/completions", "model"), results("costs", "line_item")
            rows = {row[0]: row[1:6] for row in browser.rows("#split")}
            if "demo-vllm" in usage and rows.get("demo-vllm", [""])[0] == count(
                usage["demo-vllm"]["num_model_requests"]
            ):
                break
            time.sleep(0.5)
    fields = ("num_model_requests", "input_tokens", "input_cached_tokens", "output_tokens")
    assert rows["demo-vllm"] == [
        *(count(usage["demo-vllm"][field]) for field in fields),
        dollars(Decimal(str(costs["demo-vllm"]["amount"]["value"]))),
    ]
    assert "demo-vllm" in browser.text("#latency")
    assert browser.complaints() == []
