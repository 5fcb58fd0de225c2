"""Places for files, images and tools on the page in headless Chromium, and the questions that the server proposes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from serve_fakes import TEMPLATE
from web_page_browser import WebPage, browser, opened_web_page

CALLING = TEMPLATE + '{# <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call> #}'
TOOL = {"name": "get_weather", "description": "<b>Weather</b>", "parameters": {"type": "object", "properties": {}}}


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>\n'


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    yield from browser()


@pytest.fixture
def page(server: Any, driver: Any) -> Iterator[WebPage]:
    yield from opened_web_page(server, driver)


@pytest.fixture
def calling(make_server: Any, driver: Any) -> Iterator[tuple[WebPage, Any]]:
    """The page of a model whose chat template has tools."""
    server = make_server(engine_options={"template": CALLING}, starter_prompts=["One?", "<i>Two</i>?"])
    for page in opened_web_page(server, driver):
        yield page, server


def give_tools(page: WebPage, text: str) -> None:
    page["attach"].click()
    page.until(lambda: page["menu"].is_displayed())
    page.all("#menu button")[2].click()
    page.until(lambda: page["tools"].is_displayed())
    page["tool-list"].send_keys(Keys.CONTROL, "a")
    page["tool-list"].send_keys(text)
    page.all("#tools .main")[0].click()


def test_what_a_model_has_not_is_said(page: WebPage) -> None:
    page["attach"].click()
    page.until(lambda: page["menu"].is_displayed())
    labels = ["Text file\nits text goes into the message", "Image\nfake takes no images"]
    assert page.texts("#menu button") == [*labels, "Tools\nfake's chat template has no tools"]
    assert [each.get_attribute("aria-disabled") for each in page.all("#menu button")] == [None, "true", "true"]
    page.all("#menu button")[2].click()
    assert page["menu"].is_displayed() and not page["tools"].is_displayed()
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ESCAPE)
    page.until(lambda: not page["menu"].is_displayed())
    assert page.driver.switch_to.active_element == page["attach"]
    assert page["attach"].get_attribute("aria-expanded") == "false" and not page["tools-given"].is_displayed()
    page.script("localStorage.setItem('quire.tools', JSON.stringify(JSON.stringify([{ name: 'f' }])))")
    page.driver.refresh()
    page.until(lambda: page["health"].text == "ready")
    page.say("Hello")
    page.idle()
    assert not page["tools-given"].is_displayed() and page.answers(), "tools of another model are not sent to this one"


def test_an_image_is_refused_and_a_dropped_text_is_taken(page: WebPage) -> None:
    drop = """
        const carried = new DataTransfer();
        carried.items.add(new File(arguments[0], arguments[1], { type: arguments[2] }));
        document.getElementById("chat-form").dispatchEvent(new DragEvent("drop", { dataTransfer: carried }));
    """
    page.script(drop, ["x"], "dot.png", "image/png")
    page.until(lambda: "dot.png is an image: fake takes no images" in page["chat-error"].text)
    page.script(drop, ["line"], "notes.txt", "text/plain")
    page.until(lambda: page["input"].get_property("value") == "notes.txt:\n```\nline\n```\n")
    paste = drop.replace("chat-form", "input").replace("DragEvent", "ClipboardEvent").replace('"drop"', '"paste"')
    page.script(paste.replace("dataTransfer:", "clipboardData:"), ["more"], "more.txt", "text/plain")
    page.until(lambda: "more.txt:\n```\nmore\n```" in page["input"].get_property("value"))


def test_questions_come_from_the_server(calling: tuple[WebPage, Any]) -> None:
    page, server = calling
    assert page.texts("#starters button") == ["One?", "<i>Two</i>?"]
    page.all("#starters button")[1].click()
    page.idle()
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert prompt == "user:<i>Two</i>?\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[{", "This is no JSON"), ("{}", "A list is needed"), ('[{"name": "a b"}]', 'Tool 1 needs a "name"')],
)
def test_tools_that_are_none_are_refused(calling: tuple[WebPage, Any], text: str, reason: str) -> None:
    page, _ = calling
    give_tools(page, text)
    page.until(lambda: reason in page["tools-error"].text)
    assert page["tools"].is_displayed() and not page["tools-given"].is_displayed()


def test_a_call_is_folded_and_answered_by_a_person(calling: tuple[WebPage, Any]) -> None:
    page, server = calling
    give_tools(page, json.dumps([TOOL]))
    page.until(lambda: page["tools-given"].text == "1 tool" and not page["tools"].is_displayed())
    server.engine.text = (
        "Let me look.\n" + call('{"city": "<img src=x onerror=window.hit=1>"}') + call('{"city": "Rome"}')
    )
    server.engine.delay_s = 0.002
    page.say("Weather?")
    page.idle()
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert prompt.startswith("tools:get_weather,")
    assert page.answers() == ["Let me look."] and page["announce"].text == "The model calls get_weather, get_weather."
    folds = page.all("details.call")
    assert [each.text for each in folds] == [
        'Calls get_weather {"city": "<img src=x onerror=window.hit=1>"}', 'Calls get_weather {"city": "Rome"}'
    ]  # fmt: skip
    folds[1].find_element("tag name", "summary").click()
    page.until(lambda: page.all("details.call pre")[1].text == '{\n  "city": "Rome"\n}')
    assert not page.all("#messages img") and page.script("return window.hit") is None
    fields = page.all(".calls textarea")
    fields[0].send_keys("rain", Keys.ENTER)
    assert page.driver.switch_to.active_element == fields[1], "the one that is empty"
    server.engine.text = "Rain and sun."
    fields[1].send_keys("sun", Keys.ENTER)
    page.until(lambda: len(page.answers()) == 2)
    page.idle()
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert prompt.endswith("assistant:Let me look.\n\ntool:rain\ntool:sun\n")
    assert page.answers()[1] == "Rain and sun." and not page.all(".calls textarea")
    page.driver.refresh()
    page.until(lambda: page.texts(".told") == ["rain", "sun"])
    page.say("Thanks")
    page.idle()
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert "tool:rain\ntool:sun\n" in prompt and prompt.endswith("assistant:Rain and sun.\nuser:Thanks\n")


def test_a_call_that_was_cut_off_is_not_sent_back(calling: tuple[WebPage, Any]) -> None:
    page, server = calling
    give_tools(page, json.dumps([TOOL]))
    server.engine.text = "So.\n" + '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro'
    page.say("Weather?")
    page.idle()
    assert page.texts("details.call summary") == ['Calls get_weather {"city": "Ro'] and not page.all(".calls textarea")
    server.engine.text = "Yes."
    page.say("Go on")
    page.idle()
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert page.answers()[-1] == "Yes." and prompt.endswith("user:Weather?\nassistant:So.\n\nuser:Go on\n")
