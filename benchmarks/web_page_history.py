"""How quick the web page is with a long history, in Chromium: `python benchmarks/web_page_history.py http://127.0.0.1:8000`.

Puts one conversation of 2,000 messages and 200 short ones into the browser's archive and measures in the
page: until its end is drawn after a reload, opening it from the list, the frame after a key in the input, one more
batch of earlier messages, a search through all of it. Prints the median and the worst of ten.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from selenium.webdriver.support.ui import WebDriverWait
from web_page_pictures import open_browser

ROUNDS = 10
FILL = """
    const asked = indexedDB.open("quire"), now = Date.now(), [n, done] = arguments;
    const code = "```python\\nx = 1\\n```\\n\\n" + "word ".repeat(120);
    const text = "Some *words* of an answer, a list and code.\\n\\n- one\\n- two\\n\\n" + code;
    asked.onsuccess = () => {
      const work = asked.result.transaction(["talks", "messages"], "readwrite");
      const talk = (id, n_messages, age) => {
        work.objectStore("talks").put({ id, title: "Talk " + id, created: now - age, updated: now - age });
        for (let i = 0; i < n_messages; i++) {
          const role = i % 2 ? "assistant" : "user", rest = i % 2 ? text : "A question?";
          const content = `Message ${i} of ${id}. ${rest}`;
          work.objectStore("messages").put({ talk: id, role, content, time: now, state: "done" });
        }
      };
      if (n) for (let i = 0; i < 200; i++) talk("short" + i, 4, 1e6 * (i + 1));
      if (n) talk("long", n, 0);
      work.oncomplete = () => { asked.result.close(); if (n) sessionStorage.setItem("quire.talk", "long"); done(); };
    };
"""
TYPE = """
    const done = arguments[0], began = performance.now();
    input.value += "x";
    input.dispatchEvent(new InputEvent("input", { bubbles: true }));
    requestAnimationFrame(() => {
      const seen = new MessageChannel();
      seen.port1.onmessage = () => done(performance.now() - began);
      seen.port2.postMessage(0);
    });
"""
OPEN = """
    const done = arguments[0], items = [...document.querySelectorAll(".talk-open")];
    items[1].click();
    setTimeout(() => {
      const began = performance.now(), isThere = () => messages.textContent.includes("Message 1999");
      const until = () => isThere() ? done(performance.now() - began) : requestAnimationFrame(until);
      document.querySelectorAll(".talk-open")[0].click();
      until();
    }, 300);
"""
EARLIER = """
    const done = arguments[0], began = performance.now();
    earlier.click();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
"""
SEARCH = """
    const done = arguments[0], began = performance.now();
    search.value = "message 1235 of";
    search.dispatchEvent(new InputEvent("input", { bubbles: true }));
    const isFound = () => document.querySelectorAll(".talk-open small").length === 1;
    const until = () => isFound() ? done(performance.now() - began) : requestAnimationFrame(until);
    until();
"""
CLEAR = """
    search.value = "";
    search.dispatchEvent(new InputEvent("input", { bubbles: true }));
    setTimeout(arguments[0], 400);
"""


def reloaded(driver: Any, has_talk: bool) -> float:
    """Milliseconds from the navigation's start until the page stands; with a conversation, until its end is drawn."""
    driver.refresh()
    condition = "messages.textContent.includes('Message 1999')" if has_talk else "health.innerText === 'ready'"
    waited = f"""
        const done = arguments[0];
        const until = () => {condition} ? done(performance.now()) : requestAnimationFrame(until);
        until();
    """
    return float(driver.execute_async_script(waited))


def report(name: str, measured: Callable[[], float]) -> None:
    """One line for ten measurements."""
    found = []
    for _ in range(ROUNDS):
        found.append(measured())
        time.sleep(0.1)
    print(f"{name:<44} median {statistics.median(found):7.1f} ms, worst {max(found):7.1f} ms", flush=True)


def main() -> None:
    """All of it, empty and full."""
    driver = open_browser()
    try:
        driver.set_window_size(1280, 900)
        driver.get(sys.argv[1].rstrip("/") + "/")
        WebDriverWait(driver, 60).until(lambda _: driver.execute_script("return health.innerText === 'ready'"))
        report("reload, nothing kept", lambda: reloaded(driver, False))
        report("a key, nothing kept", lambda: float(driver.execute_async_script(TYPE)))
        driver.execute_async_script(FILL, 2000)
        report("reload until its end is drawn", lambda: reloaded(driver, True))
        report("a key", lambda: float(driver.execute_async_script(TYPE)))
        report("opened from the list", lambda: float(driver.execute_async_script(OPEN)))
        report("30 earlier messages", lambda: float(driver.execute_async_script(EARLIER)))
        report("a key, 330 messages drawn", lambda: float(driver.execute_async_script(TYPE)))

        def searched() -> float:
            found = float(driver.execute_async_script(SEARCH))
            driver.execute_async_script(CLEAR)
            return found

        report("a search (150 ms of it wait for more keys)", searched)
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
