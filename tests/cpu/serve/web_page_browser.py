"""Headless Chromium in front of the page, for its tests: importing this skips a module where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

FORGET = """
    localStorage.clear(); sessionStorage.clear();
    const gone = indexedDB.deleteDatabase("quire");
    gone.onsuccess = gone.onerror = gone.onblocked = arguments[0];
"""


def browser() -> Iterator[Any]:
    """A driver, for a fixture to yield from. Stores of pages are in memory: on a busy disk to empty one took 30 s."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--incognito", "--no-sandbox", "--disable-gpu", "--window-size=1300,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    started.set_script_timeout(120)
    yield started
    started.quit()


class WebPage:
    """What a person sees and does."""

    def __init__(self, driver: Any, base: str) -> None:
        self.driver = driver
        driver.get(base + "/version")  # so that the stores of this origin can be emptied before the page runs
        driver.execute_async_script(FORGET)
        driver.get(base + "/")

    def __getitem__(self, element_id: str) -> Any:
        return self.driver.find_element(By.ID, element_id)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        return WebDriverWait(self.driver, seconds, poll_frequency=0.03).until(lambda _: condition())

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def say(self, text: str) -> None:
        self["input"].send_keys(text, Keys.ENTER)

    def idle(self) -> None:
        self.until(lambda: self["chat-send"].get_attribute("aria-label") == "Send" and not self.all("[aria-busy]"))

    def answers(self) -> list[str]:
        return self.texts(".message.assistant > .body")

    def texts(self, selector: str) -> list[str]:
        """In one call, so that nothing is replaced meanwhile."""
        code = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText.trim())"
        found: list[str] = self.script(code, selector)
        return found

    def settings(self) -> None:
        self["tab-settings"].click()


def opened_web_page(server: Any, driver: Any) -> Iterator[WebPage]:
    """The page, ready; at the end no error may stand in the browser's console."""
    driver.get("about:blank")  # an earlier page would go on asking a server that is gone
    driver.get_log("browser")  # what earlier tests left
    opened = WebPage(driver, server.base)
    opened.until(lambda: opened["health"].text == "ready")
    yield opened
    severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in severe if "status of 40" not in entry["message"]], severe


def set_number(page: WebPage, name: str, value: str) -> None:
    page.settings()
    field = page["set-" + name]
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(value)


def in_view(page: WebPage, selector: str) -> bool:
    """True once the whole element stands between the header and the input."""
    boxes = "const [b, t] = [document.querySelector(arguments[0]), talk].map((each) => each.getBoundingClientRect());"
    code = boxes + "return b.top >= t.top - 1 && b.bottom <= t.bottom + 1"
    return bool(page.until(lambda: page.script(code, selector)))
