"""The page in headless Chromium: talk, stop, regenerate, completion, errors, key, engine view, keyboard, phone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serve_fakes import ASSISTANT, USER, reply_to

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, driver: Any, base: str) -> None:
        self.driver = driver
        driver.get(base + "/version")  # so that the stores of this origin can be emptied before the page runs
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.get(base + "/")

    def __getitem__(self, element_id: str) -> Any:
        return self.driver.find_element(By.ID, element_id)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, condition: Callable[[], Any], seconds: float = 6) -> Any:
        return WebDriverWait(self.driver, seconds, poll_frequency=0.03).until(lambda _: condition())

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def say(self, text: str) -> None:
        self["input"].send_keys(text, Keys.ENTER)

    def idle(self) -> None:
        self.until(lambda: self["chat-send"].text == "Send" and not self.all("[aria-busy]"))

    def answers(self) -> list[str]:
        return [each.text for each in self.all(".message.assistant .body")]


@pytest.fixture
def page(server: Any, driver: Any) -> Iterator[Page]:
    driver.get_log("browser")  # what earlier tests left
    opened = Page(driver, server.base)
    opened.until(lambda: opened["health"].text == "ready")
    yield opened
    severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in severe if "status of 40" not in entry["message"]], severe


def set_number(page: Page, name: str, value: str) -> None:
    field = page["set-" + name]
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(value)


def test_chat_streams_and_tells_how_it_went(page: Page, server: Any) -> None:
    server.engine.delay_s = 0.01
    server.engine.cached_tokens = 3
    set_number(page, "max_tokens", "60")
    page["system"].send_keys("Be kind.")
    page.say("Hello")
    page.until(lambda: page.answers() and 3 < len(page.answers()[0]) < 60)
    assert page["chat-send"].text == "Stop"
    page.idle()
    request = server.engine.submitted[-1]
    text = server.llm.tokenizer.decode(request.prompt_token_ids)
    assert text == "system:Be kind.\nuser:Hello\n"
    assert page.answers() == [reply_to(request.prompt_token_ids)[:60].strip()]
    stats = page.all(".message.assistant .stats")[0].text
    for part in ("first token", "tokens/s", "60 tokens", f"3 of {len(request.prompt_token_ids)} prompt tokens cached"):
        assert part in stats
    assert "cut at the token limit" in stats
    page.all(".why summary")[0].click()
    page.until(lambda: "behind 7 sequences" in page.all(".waterfall")[0].text)
    assert [row.text.split()[0] for row in page.all(".phase-row")] == ["queue", "prompt", "output"]
    page.say("Again")
    page.idle()
    assert len(page.answers()) == 2
    last = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert "assistant:" + page.answers()[0] in last and last.endswith("user:Again\n")


def test_stop_regenerate_and_clear(page: Page, server: Any) -> None:
    server.engine.delay_s = 0.02
    page.say("Hello")
    page.until(lambda: page.answers() and len(page.answers()[0]) > 5)
    page["input"].send_keys(Keys.ESCAPE)
    page.idle()
    page.until(lambda: not server.engine.running)
    assert "stopped" in page.all(".stats")[0].text
    server.engine.delay_s = 0.0
    set_number(page, "max_tokens", "5")
    page.all(".again")[0].click()
    page.idle()
    assert len(page.answers()) == 1 and len(page.answers()[0]) == 5
    prompt = server.engine.submitted[-1].prompt_token_ids
    assert prompt == [USER, *server.llm.tokenizer.encode("user:Hello\n"), ASSISTANT], "the old answer is not sent back"
    page["chat-clear"].click()
    assert not page.answers() and page["empty"].is_displayed()


def test_hostile_text_is_only_text(page: Page, server: Any) -> None:
    server.engine.text = (
        "<img src=x onerror=alert(1)> **bold** `code`\n\n```python\nx = '<b>'\n```\nend <script>alert(1)</script>"
    )
    page.say("<b>me</b>")
    page.idle()
    assert not page.all("#messages img") and not page.all("#messages script") and not page.all("#messages b")
    assert page.all("#messages .user p")[0].text == "<b>me</b>"
    assert page.all("#messages pre code")[0].text == "x = '<b>'"
    assert page.all("#messages strong")[0].text == "bold"


@pytest.mark.parametrize("broken", [True, False])
def test_a_lost_connection_is_said_and_the_text_stays(page: Page, broken: bool) -> None:
    page.script(
        """
        const chunk = 'data: {"choices": [{"delta": {"content": "half"}}]}\\n\\n';
        const body = () => new ReadableStream({ start(out) {
          out.enqueue(new TextEncoder().encode(chunk));
          setTimeout(() => arguments[0] ? out.error(new TypeError("network error")) : out.close(), 50);
        } });
        const fetched = window.fetch;
        window.fetch = (path, options) =>
          path.endsWith("chat/completions") ? Promise.resolve(new Response(body())) : fetched(path, options);
    """,
        broken,
    )
    page.say("Hello")
    page.idle()
    assert page.answers() == ["half"]
    assert "The connection to the server was lost" in page.all(".message .error")[0].text


def test_errors_are_seen(page: Page, server: Any) -> None:
    set_number(page, "temperature", "500")
    page.say("Hello")
    page.idle()
    assert "temperature" in page.all(".message .error")[0].text
    assert page.all(".message .error")[0].get_attribute("role") == "alert"
    page["reset"].click()
    server.engine.fault = lambda request: True
    page.all(".again")[0].click()
    page.idle()
    assert "The engine failed" in page.all(".message .error")[-1].text
    server.engine.fault = lambda request: False
    page.all(".again")[0].click()
    page.idle()
    assert not page.all(".message .error") and len(page.answers()) == 1


def test_completion_mode(page: Page, server: Any) -> None:
    page["tab-text"].click()
    assert not page["panel-chat"].is_displayed() and not page["system-field"].is_displayed()
    set_number(page, "max_tokens", "12")
    page["text"].send_keys("Once")
    page["text"].send_keys(Keys.CONTROL, Keys.ENTER)
    made = reply_to(server.llm.tokenizer.encode("Once"))[:12]
    page.until(lambda: page["text"].get_property("value") == "Once" + made and page["text-send"].text == "Continue")
    assert page.script("return document.querySelector('#backdrop mark').textContent") == made
    assert "12 tokens" in page["text-stats"].text
    page["text-undo"].click()
    assert page["text"].get_property("value") == "Once"
    server.engine.delay_s = 0.02
    set_number(page, "max_tokens", "500")
    page["text-send"].click()
    page.until(lambda: len(page["text"].get_property("value")) > 8)
    page["text-send"].click()
    page.until(lambda: page["text-send"].text == "Continue" and not server.engine.running)
    assert "stopped" in page["text-stats"].text
    page["text-clear"].click()
    assert page["text"].get_property("value") == ""


def test_engine_view(page: Page, server: Any) -> None:
    server.engine.delay_s = 0.005
    with server.client() as http:
        http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 200})
    page.until(lambda: int(page["speed"].text) > 0)
    assert "64 pages" in page["map-note"].text and "4,096 tokens" in page["map-note"].text
    assert "of 64" in page["map"].get_attribute("aria-label")
    assert page["running"].text == "0" and page["held"].text.endswith("%")
    painted = "const c = arguments[0], d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
    colours = page.script(
        painted + "const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i]); return s.size", page["map"]
    )
    assert colours >= 3, "free and cached pages differ from the ground"
    assert page["tree-note"].text.startswith("Prefix tree: 4 nodes")
    assert page["tree"].size["height"] == 2 * 15, "two levels"


def test_engine_troubles_are_seen(make_server: Any, driver: Any) -> None:
    server = make_server(loaded=False)
    page = Page(driver, server.base)
    page.until(lambda: page["down"].is_displayed())
    assert "loading" in page["down"].text and page["health"].text == "not ready"
    server.call(lambda: server.state.attach(server.llm))
    page.until(lambda: page["health"].text == "ready" and not page["down"].is_displayed())
    server.engine.stalled = True
    page.until(lambda: page["health"].text == "stalled")
    server.call(server.engine.die)
    page.say("Hello")
    page.until(lambda: page.all(".message .error"))
    assert "stopped" in page.all(".message .error")[0].text


def test_key_is_asked_for(make_server: Any, driver: Any) -> None:
    server = make_server(api_key="open-sesame")
    page = Page(driver, server.base)
    page.until(lambda: page["key-form"].is_displayed())
    assert page["health"].text == "locked"
    page["key"].send_keys("wrong", Keys.ENTER)
    page.until(lambda: page["key-form"].is_displayed())
    page["key"].send_keys("open-sesame", Keys.ENTER)
    page.until(lambda: page["health"].text == "ready")
    assert not page["key-form"].is_displayed()
    page.say("Hello")
    page.idle()
    assert page.answers()
    assert "open-sesame" not in page.script("return JSON.stringify(localStorage)")


def test_keyboard_and_labels(page: Page) -> None:
    page["tab-chat"].send_keys(Keys.ARROW_RIGHT)
    assert page["tab-text"].get_attribute("aria-selected") == "true"
    assert page.driver.switch_to.active_element == page["tab-text"]
    page["tab-text"].send_keys(Keys.ARROW_LEFT)
    assert page["panel-chat"].is_displayed()
    unnamed = page.script(
        "return [...document.querySelectorAll('input, textarea, button, canvas')].filter((e) => !(e.labels?.length ||"
        " e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"
    )
    assert not unnamed


def test_nothing_comes_from_elsewhere(page: Page, server: Any) -> None:
    names = page.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert names and all(name.startswith(server.base) for name in names)


def test_light_dark_and_phone(page: Page) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = page.script(ground)
    page["theme"].click()
    assert page.script(ground) != before
    driver = page.driver
    metrics = {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert page.script("return document.documentElement.scrollWidth") <= 360
        assert page["chat-send"].is_displayed() and not page["side"].is_displayed()
        page["panel-toggle"].click()
        assert page["side"].is_displayed() and page["panel-toggle"].get_attribute("aria-expanded") == "true"
        assert page.script("return document.documentElement.scrollWidth") <= 360
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
