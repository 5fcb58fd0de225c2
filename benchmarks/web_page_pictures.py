"""Pictures of the web page for the documents: `python benchmarks/web_page_pictures.py http://127.0.0.1:8000 [FOLDER]`.

The server and what is drawn of its engine are real: 12 requests run meanwhile. The conversation was written for the
picture and is put into the browser's archive, because the bundled model writes neither tables nor formulas well.
Writes web-page.png, web-page-dark.png, web-page-phone.png and web-page-phone-dark.png; a pool of 1200 KV pages
(`--num-gpu-blocks-override`) suits the size. Needs chromium, selenium, Pillow.
"""

from __future__ import annotations

import io
import json
import pathlib
import shutil
import sys
import threading
import urllib.request
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

SIZES = {"desktop": (1280, 800, False), "phone": (390, 844, True)}
QUESTION = "How long does a token take, at least, when the memory is the limit?"
ANSWER = r"""Each token reads all weights once, so it takes at least

$$t = \frac{\text{bytes of the weights}}{\text{bandwidth}} = \frac{n \cdot b / 8}{B}$$

for $n$ parameters of $b$ bits. With $B = 40$ GB/s:

| model | 16 bits | 8 bits | 4 bits |
|:--|--:|--:|--:|
| 0.6 B | 30 ms | 15 ms | 8 ms |
| 8 B | 400 ms | 200 ms | 100 ms |

```python
def least_time_s(n: float, bits: int, bandwidth: float) -> float:
    return n * bits / 8 / bandwidth  # keys and values come on top
```
"""
STORE = """
    const [answer, question, done] = arguments, now = Date.now(), asked = indexedDB.open("quire");
    asked.onsuccess = () => {
      const work = asked.result.transaction(["talks", "messages"], "readwrite");
      const put = (id, title, age, messages) => {
        work.objectStore("talks").put({ id, title, created: now - age, updated: now - age });
        const store = work.objectStore("messages");
        for (const each of messages) store.put({ talk: id, time: now - age, state: "done", ...each });
      };
      put("a", "The least time of a token", 0, [{ role: "user", content: question },
        { role: "assistant", model: "demo", content: answer, reasoning: "Weights are read once.", thoughtMs: 2400 }]);
      put("b", "Names for a printing press", 6e6, []);
      put("c", "Reverse a string", 9e7, []);
      put("d", "A prompt for the weather tool", 2e8, []);
      work.oncomplete = () => { asked.result.close(); sessionStorage.setItem("quire.talk", "a"); done(); };
    };
"""


def keep_busy(base: str, stop: threading.Event, number: int) -> None:
    """Chats of some length with beginnings that are shared, so that pages are held and cached."""
    told = "You write letters for the press. " * 12 + "Be brief. " * (number % 3)
    asked = f"{number}: Write about {['rivers', 'paper', 'winter', 'trains'][number % 4]}."
    messages = [{"role": "system", "content": told}, {"role": "user", "content": asked}]
    body = {"model": "demo", "messages": messages, "max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    headers = {"content-type": "application/json"}
    while not stop.is_set():
        asking = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(asking, timeout=300).read()


def open_browser() -> Any:
    """Headless Chromium."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def take(driver: Any, base: str, size: str, scheme: str) -> Image.Image:
    """The web page with the conversation, as it is once formulas, code and the picture of the engine are drawn."""
    width, height, mobile = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    driver.get(base + "/")
    drawn = (
        "return document.querySelector('math') && document.querySelector('.hljs-keyword') && Number(running.innerText)"
    )
    WebDriverWait(driver, 60).until(lambda _: driver.execute_script(drawn))
    driver.execute_async_script("setTimeout(arguments[0], 6000)")  # a line of speeds
    driver.execute_script("document.activeElement.blur(); document.getElementById('talk').scrollTop = 0")
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def main() -> None:
    """Take all pictures."""
    base, folder = sys.argv[1].rstrip("/"), pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else "docs")
    stop = threading.Event()
    busy = [threading.Thread(target=keep_busy, args=(base, stop, number)) for number in range(12)]
    for thread in busy:
        thread.start()
    driver = open_browser()
    try:
        driver.get(base + "/")
        driver.execute_async_script("setTimeout(arguments[0], 500)")
        driver.execute_async_script(STORE, ANSWER, QUESTION)
        for size in SIZES:
            for scheme in ("light", "dark"):
                picture = take(driver, base, size, scheme)
                name = f"web-page{'-phone' if size == 'phone' else ''}{'-dark' if scheme == 'dark' else ''}.png"
                picture.save(folder / name, optimize=True)
                print(name, (folder / name).stat().st_size, "bytes")
    finally:
        stop.set()
        driver.quit()


if __name__ == "__main__":
    main()
