"""The page in headless Chromium: talk, stop, regenerate, completion, errors, key, engine, keyboard, phone, archive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from serve_fakes import ASSISTANT, MAX_MODEL_LEN, USER, reply_to
from web_page_browser import WebPage, browser, in_view, opened_web_page, set_number


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    yield from browser()


@pytest.fixture
def page(server: Any, driver: Any) -> Iterator[WebPage]:
    yield from opened_web_page(server, driver)


def test_chat_streams_and_tells_how_it_went(page: WebPage, server: Any) -> None:
    server.engine.delay_s = 0.01
    server.engine.cached_tokens = 3
    set_number(page, "max_tokens", "60")
    page.settings()
    page["system"].send_keys("Be kind.")
    page.say("Hello")
    page.until(lambda: page.answers() and 3 < len(page.answers()[0]) < 60)
    assert page["chat-send"].get_attribute("aria-label") == "Stop"
    page.idle()
    request = server.engine.submitted[-1]
    text = server.llm.tokenizer.decode(request.prompt_token_ids)
    assert text == "system:Be kind.\nuser:Hello\n"
    assert page.answers() == [reply_to(request.prompt_token_ids)[:60].strip()]
    stats = page.all(".message.assistant .stats")[0].text
    for part in ("first token", "tokens/s", "60 tokens", f"3 of {len(request.prompt_token_ids)} prompt tokens cached"):
        assert part in stats
    assert "cut at the token limit" in stats
    page.all(".why")[0].click()
    page.until(lambda: "It waited 250 ms behind 7 sequences" in page.all(".waterfall")[0].text)
    rows = [row.text.split() for row in page.all(".phase-row:not(.scale)")]
    assert rows == [["queue", "250", "ms"], ["prompt", "250", "ms"], ["output", "1,500", "ms"]]
    assert "What it should have taken is not known" in page.all(".waterfall")[0].text
    assert not page.all(".track .expected")
    assert in_view(page, ".waterfall")
    page.say("Again")
    page.idle()
    assert len(page.answers()) == 2
    last = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert "assistant:" + page.answers()[0] in last and last.endswith("user:Again\n")


def test_stop_regenerate_and_clear(page: WebPage, server: Any) -> None:
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
    page["new"].click()
    page.until(lambda: page["empty"].is_displayed())
    assert not page.answers()


@pytest.mark.parametrize("secure", [True, False])
def test_copy_works_and_says_so(page: WebPage, server: Any, secure: bool) -> None:
    """Over plain http the browser has no navigator.clipboard: an older way stands in."""
    server.engine.text = "Some *text*."
    page.script("window.copied = []; document.addEventListener('copy', () => copied.push(String(getSelection())))")
    written = "{ writeText: (text) => { copied.push(text); return Promise.resolve(); } }" if secure else "undefined"
    page.script(f"Object.defineProperty(navigator, 'clipboard', {{ value: {written}, configurable: true }})")
    page.say("Hello")
    page.idle()
    page.all(".assistant .copy")[0].click()
    page.until(lambda: page["announce"].text == "Copied.")
    assert page.script("return copied.length") == 1
    if secure:
        assert page.script("return copied") == ["Some *text*."]
    page.until(lambda: page.driver.switch_to.active_element == page.all(".assistant .copy")[0])
    page.script("document.execCommand = () => false")
    page.script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.until(lambda: not page.all("[data-done]"))
    page.all(".assistant .copy")[0].click()
    page.until(lambda: "Ctrl+C" in page["toast"].text)


def test_edit_and_continue(page: WebPage, server: Any) -> None:
    set_number(page, "max_tokens", "5")
    for text in ("One", "Two"):
        page.say(text)
        page.idle()
    page.all(".go-on")[0].click()
    page.idle()
    assert len(page.answers()) == 2 and len(page.answers()[1]) == 10
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert prompt.endswith("assistant:" + page.answers()[1][:5]), "it goes on from what there was"
    page.all(".edit")[0].send_keys(Keys.ENTER)
    assert "The 3 messages after it are replaced." in page.all(".edit-form")[0].text
    page.all(".edit-form textarea")[0].send_keys(Keys.CONTROL, "a")
    page.all(".edit-form textarea")[0].send_keys("Three", Keys.ENTER)
    page.until(lambda: len(page.all(".message")) == 2)
    page.idle()
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert prompt == "user:Three\n"


def test_a_prompt_that_is_too_long_comes_back(page: WebPage, server: Any) -> None:
    set_number(page, "max_tokens", "5")
    page.say("First")
    page.idle()
    page.script("document.getElementById('input').value = 'long '.repeat(1000)")
    page["input"].send_keys(Keys.ENTER)
    page.until(lambda: page["chat-error"].is_displayed())
    assert "4095 can be taken" in page["chat-error"].text and "back in the input" in page["chat-error"].text
    assert page["input"].get_property("value") == ("long " * 1000).strip()
    assert len(page.all(".message")) == 2, "only the first question and its answer are left"
    page["input"].send_keys(Keys.CONTROL, "a")
    page.say("Second")
    page.idle()
    assert not page["chat-error"].is_displayed() and len(page.answers()) == 2
    page.all(".edit")[0].send_keys(Keys.ENTER)
    page.script("document.querySelector('.edit-form textarea').value = 'long '.repeat(1000)")
    page.all(".edit-form textarea")[0].send_keys(Keys.ENTER)
    page.until(lambda: page["chat-error"].is_displayed())
    assert len(page.answers()) == 2, "an edit that fails loses nothing"


def test_the_whole_room_is_taken_where_nothing_is_chosen(page: WebPage, server: Any) -> None:
    page.say("Hello")
    page.idle()
    asked = server.engine.submitted[-1]
    assert asked.max_tokens == MAX_MODEL_LEN - len(asked.prompt_token_ids)
    page["tab-text"].click()
    page["text"].send_keys("Once", Keys.CONTROL, Keys.ENTER)
    page.until(lambda: server.engine.submitted[-1] is not asked and page["text-send"].text == "Continue")
    assert server.engine.submitted[-1].max_tokens == MAX_MODEL_LEN - len("Once")


def test_a_text_file_becomes_part_of_the_message(page: WebPage, tmp_path: Any) -> None:
    (tmp_path / "notes.txt").write_text("line one\nline two\n")
    (tmp_path / "dot.png").write_bytes(b"\x89PNG\0\0")
    page["file"].send_keys(str(tmp_path / "notes.txt"))
    page.until(lambda: page["input"].get_property("value") == "notes.txt:\n```\nline one\nline two\n```\n")
    page["file"].send_keys(str(tmp_path / "dot.png"))
    page.until(lambda: "dot.png is an image: fake takes no images" in page["chat-error"].text)


@pytest.mark.parametrize("broken", [True, False])
def test_a_lost_connection_is_said_and_the_text_stays(page: WebPage, broken: bool) -> None:
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


def test_errors_are_seen(page: WebPage, server: Any) -> None:
    set_number(page, "temperature", "500")
    page.say("Hello")
    page.idle()
    assert "temperature" in page.all(".message .error")[0].text
    assert page.all(".message .error")[0].get_attribute("role") == "alert"
    page.script("document.getElementById('reset').click()")
    server.engine.fault = lambda request: True
    page.all(".again")[0].click()
    page.until(lambda: any("The engine failed" in text for text in page.texts(".message .error")))
    page.idle()
    server.engine.fault = lambda request: False
    page.all(".again")[0].click()
    page.until(lambda: not page.all(".message .error") and [text for text in page.answers() if text])
    page.idle()
    assert not page.all(".message .error") and len(page.answers()) == 1


def test_completion_mode(page: WebPage, server: Any) -> None:
    page["tab-text"].click()
    set_number(page, "max_tokens", "12")
    assert not page["panel-chat"].is_displayed() and not page["system-field"].is_displayed()
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


def test_engine_view(page: WebPage, server: Any) -> None:
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
    chain = ActionChains(page.driver)
    chain.move_to_element_with_offset(page["map"], 4 - page["map"].size["width"] // 2, 0).perform()
    page.until(lambda: page["tip"].text.startswith("Page"))
    chain.move_to_element_with_offset(page["tree"], 0, -7).perform()
    page.until(lambda: "Node at level 1: 4 pages, 64 tokens; below it 5 pages" in page["tip"].text)
    said = "Experts: 2 layers of 4; the busiest has 2.5 × the tokens of its layer's mean, 1 of all have hardly any"
    assert page["experts-note"].text == said
    assert page["experts"].size["height"] == 2 * 8
    chain.move_to_element_with_offset(page["experts"], -2, -4).perform()
    page.until(lambda: "Expert 1 of layer 1\n2.5 × the tokens of the mean one" in page["tip"].text)


def test_what_drafts_do_is_one_line(page: WebPage, server: Any) -> None:
    with server.client() as http:
        for drafts, line in [
            ((0, 0, [], 0.0), ""),
            ((0, 0, [0, 0], 0.0), "Drafts: none verified yet"),
            ((40, 1600, [30, 12], 1.25), "Drafts: 1,600 verified, 42 right (3 %), 1.05 a time; they saved 1.3 s"),
            ((40, 80, [4, 1], -0.2), "Drafts: 80 verified, 5 right (6 %), 0.13 a time; they cost 0.2 s"),
        ]:
            server.engine.drafts = drafts
            http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 1})
            page.until(lambda line=line: page["drafts-note"].text == line)
            assert page["drafts-note"].is_displayed() == bool(line)


def test_a_model_without_experts_draws_none(page: WebPage) -> None:
    shown = page.driver.execute_async_script(
        "import('/page/experts.js').then((experts) => { experts.drawExperts([]);"
        " arguments[0](['experts', 'experts-note'].map((id) => document.getElementById(id).offsetHeight)) })"
    )
    assert shown == [0, 0]


def test_a_cut_tree_says_so(page: WebPage) -> None:
    note = page.driver.execute_async_script(
        "import('/page/tree.js').then((tree) => { const nodes = Array.from({ length: 240 }, () => [-1, 1, 0]);"
        " tree.drawTree(nodes, 1500); arguments[0](document.getElementById('tree-note').textContent) })"
    )
    assert note == "Prefix tree: the 240 heaviest of 1,500 nodes, 0 held"


def test_engine_troubles_are_seen(make_server: Any, driver: Any) -> None:
    server = make_server(loaded=False)
    page = WebPage(driver, server.base)
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
    page = WebPage(driver, server.base)
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


def test_keyboard_and_labels(page: WebPage) -> None:
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


def test_nothing_comes_from_elsewhere(page: WebPage, server: Any) -> None:
    names = page.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert names and all(name.startswith(server.base) for name in names)


def test_light_and_dark(page: WebPage) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = page.script(ground)
    page["theme"].click()
    chosen = page.script(ground)
    assert chosen != before
    page.driver.refresh()
    page.until(lambda: page.script(ground) == chosen)


TARGETS = """
    const found = [...document.querySelectorAll("button, input, textarea, select, summary, a[href]")];
    const seen = found.filter((each) => each.checkVisibility() && each.type !== "checkbox" && !each.matches(".skip"));
    const sizes = seen.map((each) => [each.outerHTML.slice(0, 90), each.getBoundingClientRect()]);
    return sizes.filter(([, box]) => box.height < 43.5 || box.width < 43.5).map(([text, box]) => text + box.height);
"""
"""What a thumb cannot hit: under 44 pixels."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(page: WebPage, server: Any, scheme: str) -> None:
    driver, server.engine.text = page.driver, "Some words.\n\n```python\n" + "x = 1 " * 60 + "\n```\n"
    page.say("A question that is long enough for two lines on a narrow screen, and then some.")
    page.idle()
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    try:
        page.until(lambda: not page["side"].is_displayed() and not page["shelf"].is_displayed())
        assert page.all("header")[0].size["height"] <= 56, "one row"
        assert page["chat-send"].is_displayed()
        assert page.script(TARGETS) == []
        for name, button in (("side", "panel-toggle"), ("shelf", "shelf-toggle")):
            page[button].click()
            assert page[name].is_displayed() and page[button].get_attribute("aria-expanded") == "true"
            assert page.script("return document.getElementById('main').inert")
            assert page.script(TARGETS) == []
            assert page.script("return document.documentElement.scrollWidth") <= 390
            driver.switch_to.active_element.send_keys(Keys.ESCAPE)
            page.until(lambda name=name: not page[name].is_displayed())
            assert driver.switch_to.active_element == page[button]
        assert not page.script("return document.getElementById('main').inert")
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def titles(page: WebPage) -> list[str]:
    return page.texts(".talk-open > span")


def menu(page: WebPage, title: str, entry: str) -> None:
    """Choose from the menu of a conversation."""
    page.script(
        "[...document.querySelectorAll('.talk-item')].find((e) => e.innerText.includes(arguments[0]))"
        ".querySelector('.talk-more').click()",
        title,
    )
    page.until(lambda: page["menu"].is_displayed())
    next(each for each in page.all("#menu button") if each.text == entry).click()


def test_conversations_are_kept_found_named_and_deleted(page: WebPage, server: Any) -> None:
    set_number(page, "max_tokens", "9")
    for text in ("The first question", "Another <b>thing</b>"):
        page["new"].click()
        page.until(lambda: not page.answers())
        page.say(text)
        page.idle()
        page.until(lambda text=text: text in titles(page))
    answer = page.answers()[0]
    page.driver.refresh()
    page.until(lambda: titles(page) == ["Another <b>thing</b>", "The first question"])
    page.until(lambda: page.answers() == [answer])
    page.all(".talk-open")[1].click()
    page.until(lambda: page.texts(".message.user .body") == ["The first question"])
    page.all(".talk-open")[0].click()
    page.until(lambda: page.answers() == [answer])
    assert "9 tokens" in page.all(".stats")[0].text
    page.say("More")
    page.idle()
    assert "user:Another <b>thing</b>\nassistant:" in server.llm.tokenizer.decode(
        server.engine.submitted[-1].prompt_token_ids
    )
    page["search"].send_keys("FIRST q")
    page.until(lambda: titles(page) == ["The first question"])
    page["search"].send_keys(Keys.ESCAPE)
    page.until(lambda: len(titles(page)) == 2)
    menu(page, "Another", "Rename")
    page.driver.switch_to.active_element.send_keys("Things", Keys.ENTER)
    page.until(lambda: titles(page) == ["Things", "The first question"])
    menu(page, "Things", "Delete")
    page.until(lambda: titles(page) == ["The first question"] and page["empty"].is_displayed())
    page.all("#toast button")[0].click()
    page.until(lambda: titles(page) == ["Things", "The first question"])
    page.all(".talk-open")[0].click()
    page.until(lambda: len(page.answers()) == 2)


def test_a_conversation_is_exported(page: WebPage, server: Any) -> None:
    server.engine.text = "An *answer*."
    page.say("A question?")
    page.idle()
    page.script(
        "window.saved = []; HTMLAnchorElement.prototype.click = function () { window.savedName = this.download; };"
        " URL.createObjectURL = (blob) => {"
        " blob.text().then((text) => saved.push([blob.type, text])); return '#'; };"
    )
    menu(page, "A question", "Export as JSON")
    kind, text = page.until(lambda: page.script("return window.saved[0]"))
    found = json.loads(text)
    assert kind == "application/json" and found["title"] == "A question?"
    pairs = [(each["role"], each["content"]) for each in found["messages"]]
    assert pairs == [("user", "A question?"), ("assistant", "An *answer*.")]
    assert page.script("return window.savedName") == "A-question.json"
    menu(page, "A question", "Export as Markdown")
    kind, text = page.until(lambda: page.script("return window.saved[1]"))
    assert text == "# A question?\n\n## You\n\nA question?\n\n## fake\n\nAn *answer*.\n"


FILL = """
    const asked = indexedDB.open("quire"), now = Date.now(), done = arguments[0];
    asked.onsuccess = () => {
      const work = asked.result.transaction(["talks", "messages"], "readwrite");
      work.objectStore("talks").put({ id: "long", title: "Long", created: now, updated: now });
      for (let i = 0; i < 2000; i++) {
        const content = `Message **${i}**. ` + "word ".repeat(60), role = i % 2 ? "assistant" : "user";
        work.objectStore("messages").put({ talk: "long", role, content, time: now, state: "done" });
      }
      work.oncomplete = () => { asked.result.close(); done(); };
    };
"""


def test_a_long_history_is_drawn_as_it_is_scrolled_to(page: WebPage) -> None:
    page.driver.execute_async_script(FILL)
    page.driver.refresh()
    page.until(lambda: titles(page) == ["Long"])
    page.all(".talk-open")[0].click()
    page.until(lambda: "Message 1999" in page.texts("#messages")[0])
    assert len(page.all(".message")) <= 60, "only the end of it"
    assert page.script("return talk.scrollHeight - talk.scrollTop - talk.clientHeight") < 2
    counted = len(page.all(".message"))
    first = page.script(
        "window.mark = messages.firstElementChild; talk.scrollTop = 0; return mark.getBoundingClientRect().top"
    )
    page.until(lambda: len(page.all(".message")) > counted)
    moved = page.script("return mark.getBoundingClientRect().top")
    assert abs(moved - first) < 200, "what was in view stays in view"
    page["search"].send_keys("message **1234**")
    page.until(lambda: any("1234" in each for each in page.texts(".talk-open small")))


def test_an_answer_goes_on_while_another_conversation_is_shown(page: WebPage, server: Any) -> None:
    server.engine.delay_s = 0.01
    set_number(page, "max_tokens", "80")
    page.say("Slow")
    page.until(lambda: page.answers() and len(page.answers()[0]) > 3)
    page["new"].click()
    page.until(lambda: page["empty"].is_displayed())
    assert page["chat-send"].get_attribute("aria-label") == "Send" and page.all(".working")
    page.until(lambda: not page.all(".working"))
    page.all(".talk-open")[0].click()
    page.until(lambda: page.answers() and len(page.answers()[0]) > 60)
    assert "80 tokens" in page.all(".stats")[0].text


def test_a_browser_that_keeps_nothing_still_talks(page: WebPage, server: Any) -> None:
    source = "Object.defineProperty(window, 'indexedDB', { value: { open() { throw new Error('private'); } } })"
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    try:
        page.driver.refresh()
        page.until(lambda: "keeps nothing" in page["no-talks"].text)
        set_number(page, "max_tokens", "5")
        page.say("Hello")
        page.idle()
        assert len(page.answers()[0]) == 5 and titles(page) == ["Hello"]
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_keys_of_the_input(page: WebPage, server: Any) -> None:
    set_number(page, "max_tokens", "5")
    page["input"].send_keys("one", Keys.SHIFT, Keys.ENTER)
    page["input"].send_keys("two")
    assert not page.answers() and page["input"].get_property("value") == "one\ntwo"
    page["input"].send_keys(Keys.ENTER)
    page.idle()
    assert page.texts(".message.user .body") == ["one\ntwo"] and page["input"].get_property("value") == ""
    page["input"].send_keys(Keys.CONTROL, Keys.SHIFT, "o")
    page.until(lambda: page["empty"].is_displayed())


def test_a_screen_reader_hears_the_answer_once(page: WebPage, server: Any) -> None:
    server.engine.text = "First sentence. Second one. **Third**, which is the last"
    server.engine.delay_s = 0.005
    page.say("Hello")
    page.idle()
    heard = page.script("return [...document.querySelectorAll('#live p')].map((e) => e.textContent)")
    assert "".join(heard) == server.engine.text.replace("**", "") and len(heard) > 1
    assert page["live"].get_attribute("aria-live") == "polite" and page["announce"].text == "Answer complete."
    unnamed = page.script(
        "return [...document.querySelectorAll('button, input, textarea, canvas, [role=log], nav, aside')].filter((e) =>"
        " !(e.labels?.length || e.getAttribute('aria-label') || e.innerText.trim())).map((e) => e.outerHTML)"
    )
    assert [each for each in unnamed if "starters" not in each and 'hidden=""' not in each] == []
