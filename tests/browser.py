"""Chromium without a window, as the tests of pages see it.

Selenium rather than Playwright: it drives the browser that is installed, through the driver that came with it, and is a
fifth of the size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

CHROMIUM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER: Final = shutil.which("chromedriver")


class Browser:
    """Chromium, and what it did since the last look."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, key: str | None = None) -> None:
        """A fresh page; with a key, signed in and drawn."""
        self.complaints(), self.requests()
        self.driver.get(url)
        if key is not None:
            self.sign_in(key)
            self.until(lambda: self.text("#updated").startswith("As of"))

    def sign_in(self, key: str) -> None:
        self.driver.find_element(By.ID, "key").send_keys(key, Keys.ENTER)

    def choose(self, name: str, value: str) -> None:
        """Change a choice, and wait for what it brings."""
        Select(self.driver.find_element(By.ID, name)).select_by_value(value)
        self.until(lambda: not self.script("return document.querySelector('#board').classList.contains('busy')"))

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def rows(self, selector: str) -> list[list[str]]:
        """A table's cells, folded away or not."""
        found: list[list[str]] = self.script(
            f"return [...document.querySelectorAll('{selector} tbody tr, {selector} tfoot tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        return found

    def script(self, code: str) -> Any:
        return self.driver.execute_script(code)

    def until(self, met: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 30, 0.02).until(lambda _: met())

    def complaints(self) -> list[str]:
        """What the console has against the page."""
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """The URL of every request."""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def _log(self, name: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(name)  # type: ignore[no-untyped-call]
        return entries


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser that finds no host but this machine."""
    assert CHROMIUM is not None
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",  # root has none
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--window-size=1360,1600",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
