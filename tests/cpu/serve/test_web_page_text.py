"""What a model writes, on the page in headless Chromium: hostile text, Markdown, formulas, reasoning, growing texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from serve_fakes import TEMPLATE
from web_page_browser import WebPage, browser, opened_web_page


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    yield from browser()


@pytest.fixture
def page(server: Any, driver: Any) -> Iterator[WebPage]:
    yield from opened_web_page(server, driver)


HOSTILE = """<img src=x onerror="window.hit=1"> **bold** <script>window.hit=1</script></script> <b onclick=x>b</b>

<img src=x onerror="window.hit=1">

<svg/onload="window.hit=1"><style>body{display:none}</style>

[a](javascript:window.hit=1) [b](JAVA&#115;CRIPT:window.hit=1) [c](data:text/html,x) <javascript:window.hit=1>
[d](vbscript:x) [e](https://example.org/"onmouseover="window.hit=1) ![f](x"onerror="window.hit=1) [g][r] [h](/v1/models)

[r]: javascript:window.hit=1

| t |
|:-:|
| <iframe src=javascript:window.hit=1> `</code><img src=x onerror=window.hit=1>` |

```html" onclick="window.hit=1
x = '<b>' </code></pre><img src=x onerror="window.hit=1">
```

\\(<img src=x onerror=window.hit=1>\\) $$<img src=x onerror=window.hit=1>$$ H<sub>2</sub>O<br><sub onclick=x>y</sub>
"""


def test_hostile_text_is_only_text(page: WebPage, server: Any) -> None:
    server.engine.text = HOSTILE
    page.say("<b>me</b>")
    page.idle()
    page.until(lambda: page.all("#messages pre code"))
    inside = "#messages :is(img, script, b, svg:not(.icon-drawing), style, iframe, object, form, base, meta)"
    assert not page.all(inside)
    assert page.all("#messages .user p")[0].text == "<b>me</b>"
    assert page.all("#messages strong")[0].text == "bold"
    assert "x = '<b>' </code></pre><img src=x onerror=" in page.all("#messages pre code")[0].text
    assert '<img src=x onerror="window.hit=1">' in page.answers()[0]
    links = page.script("return [...document.querySelectorAll('#messages a[href]')].map((a) => [a.protocol, a.rel])")
    assert links and all(found == ["https:", "noopener noreferrer nofollow"] for found in links)
    handlers = "return [...document.querySelectorAll('#messages *')].flatMap((e) => e.getAttributeNames()).filter("
    assert not page.script(handlers + "(name) => name.startsWith('on') || name === 'style')")
    assert [each.text for each in page.all("#messages sub")] == ["2"]
    assert page.script("return window.hit") is None


def test_the_page_cannot_make_nodes_from_a_text(page: WebPage) -> None:
    """The browser itself refuses HTML that did not pass the sanitiser, whatever a later change of the page does."""
    refused = "try { document.body.innerHTML = '<b>x</b>'; return false } catch (error) { return error.name }"
    assert page.script(refused) == "TypeError"
    page.driver.get_log("browser")  # the refusal is told there


MARKDOWN = """## A title

A [link](https://example.org/a?b=1&c=2), *slanted*, ~~gone~~ and `code`.

| Name | Count |
|:--|--:|
| one | 12 |

1. first
   - inner
2. second

- [x] done

```python
def f(x: int) -> int:
    return x + 1  # more
```

It costs \\(a_1 * b_2\\).
"""


def test_markdown_is_shown(page: WebPage, server: Any) -> None:
    server.engine.text, server.engine.tokens_a_step = MARKDOWN, 5
    page.say("Hello")
    page.idle()
    assert page.all("#messages h2")[0].text == "A title"
    assert page.all("#messages a")[0].get_attribute("href") == "https://example.org/a?b=1&c=2"
    assert [each.text for each in page.all("#messages td")] == ["one", "12"]
    assert page.all("#messages td")[1].value_of_css_property("text-align") == "right"
    assert page.all("#messages ol ul li")[0].text == "inner"
    assert page.all("#messages del")[0].text == "gone" and page.all("#messages input:checked:disabled")
    assert page.all("#messages input")[0].accessible_name == "done"
    page.until(lambda: [each.text for each in page.all(".maths math msub")] == ["a\n1", "b\n2"])
    page.until(lambda: page.all(".code .hljs-keyword"))
    assert page.all(".code figcaption span")[0].text == "python"
    assert page.all(".code code")[0].text == "def f(x: int) -> int:\n    return x + 1  # more"


MATHS = r"""It costs $5 and $6, and $PATH:$HOME or `$x$` or \$y$ is no formula; $x^2$ and \(e^{i\pi}\) are.

$$\int_0^1 x\,dx$$

\[
\begin{align} a &= b \\ &= c \end{align}
\]

1. In a list:
   $$\frac{1}{2}$$
"""


def test_formulas_are_typeset(page: WebPage, server: Any) -> None:
    server.engine.text, server.engine.tokens_a_step = MATHS, 3
    page.say("Hello")
    page.idle()
    page.until(lambda: len(page.all(".maths.typeset")) == 5 and not page.all(".maths:not(.typeset)"))
    kinds = page.script("return [...document.querySelectorAll('.maths math')].map((e) => e.getAttribute('display'))")
    assert kinds == [None, None, "block", "block", "block"]
    assert page.all("math")[0].find_elements(By.CSS_SELECTOR, "msup mn")[0].text == "2"
    assert "It costs $5 and $6, and $PATH:$HOME or $x$ or $y$ is no formula" in page.answers()[0]
    spaces = "return [...document.querySelectorAll('math')].every((each) => each.namespaceURI.endsWith('MathML'))"
    assert page.script(spaces) and page.all("li math mfrac") and page.all("math mtable mtd")
    assert page.script("return talk.scrollHeight - talk.scrollTop - talk.clientHeight") < 2, "the end is still in view"
    page.driver.refresh()
    page.until(lambda: len(page.all(".maths.typeset")) == 5)
    page.until(lambda: page.script("return talk.scrollHeight - talk.scrollTop - talk.clientHeight") < 2)


HOSTILE_MATHS = r"""$\href{javascript:window.hit=1}{a}$ $\url{javascript:window.hit=1}$ $\includegraphics{/v1/models}$
$\class{danger}{x}$ $\id{input}{x}$ $\style{position:fixed}{x}$ $\data{a=b}{x}$ $\htmlStyle{top:0}{x}$

$\text{<img src=x onerror="window.hit=1">}$ $\text{</mtext></math><script>window.hit=1</script>}$
$\text{<mglyph><style><img src=x onerror=window.hit=1>}$ $\mathrm{"onmouseover="window.hit=1}$ $\text{a style="top:0}$

$\frac{1$ $\left( x$ $\def\a{\a\a}\a$ $\def\b{\b}\b$ $\nosuch{x}$ $\begin{matrix} 1$

$$\kern{-9000em} over \rule{9000em}{9000em} \raisebox{9000em}{x} \hspace{-9000px} y$$

$$\color{red;background:url(//example.org/x)} x \textcolor{url(//example.org/y)}{y}$$
"""


ENDLESS_MATHS = f"${'{' * 3000}x{'}' * 3000}$ ${'x' * 20_000}$\n\nThe end $1+1$"


def test_hostile_formulas_do_no_harm(page: WebPage, server: Any) -> None:
    """What cannot be read stays as it was written; nothing is run, loaded, or drawn outside of its answer."""
    server.engine.text, server.engine.tokens_a_step = HOSTILE_MATHS + ENDLESS_MATHS, 50
    page.say("Hello")
    page.idle()
    page.until(lambda: page.all(".maths.typeset mn"))
    for source in (r"$\frac{1$", r"$\def\a{\a\a}\a$", r"$\nosuch{x}$", r"$\href{javascript:window.hit=1}{a}$"):
        left = [each for each in page.all(".maths:not(.typeset)") if each.text == source]
        assert left and left[0].get_attribute("title").startswith("Not typeset: ")
    foreign = "img, script, a, svg:not(.icon-drawing), style, iframe, annotation-xml, mglyph, [id], [href]"
    assert not page.all(f"#messages :is({foreign})")
    handlers = "return [...document.querySelectorAll('#messages *')].flatMap((e) => e.getAttributeNames()).filter("
    assert not page.script(handlers + "(name) => name.startsWith('on') || name.startsWith('data-look'))")
    styles = "return [...document.querySelectorAll('#messages [style]')].map((e) => e.getAttribute('style')).join()"
    assert not {"url", "position", "top", "fixed"} & set(re.findall(r"[a-z]+", page.script(styles)))
    assert page.script("return window.hit") is None
    under = "const b = input.getBoundingClientRect(); return document.elementFromPoint(b.x + 20, b.y + 10).id"
    assert page.script(under) == "input"
    assert page.script("return talk.scrollWidth <= talk.clientWidth && messages.offsetHeight < 40000")


THINKING = TEMPLATE + "{# <think></think> #}"


def test_reasoning_is_folded_while_it_streams(make_server: Any, driver: Any) -> None:
    server = make_server(engine_options={"template": THINKING})
    page = WebPage(driver, server.base)
    page.until(lambda: page["health"].text == "ready")
    server.engine.delay_s = 0.01
    server.engine.text = "<think>" + "Is it *two*? <img src=x> " * 6 + "</think>\n\nIt is two."
    page.say("1 + 1?")
    page.until(lambda: page.all(".thought") and page.all(".thought summary")[0].text.startswith("Thinking"))
    assert page.answers() == [""] and not page.all(".thought .body")[0].is_displayed()
    page.all(".thought summary")[0].click()
    page.until(lambda: "Is it two?" in page.all(".thought .body")[0].text)
    page.idle()
    assert page.answers() == ["It is two."]
    assert page.all(".thought summary")[0].text.startswith("Thought for")
    assert page.all(".thought .body")[0].text.count("<img src=x>") == 6 and not page.all("#messages img")
    page.say("And 2 + 2?")
    page.idle()
    sent = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert "assistant:It is two.\n" in sent, "reasoning is not sent back"


def test_a_very_long_answer_stays_quick(page: WebPage, server: Any) -> None:
    """Only the block that grows is made again: earlier paragraphs stay the same nodes."""
    server.engine.text = "A paragraph with **words** in it.\n\n" * 60 + "The last one goes on " * 30
    server.engine.tokens_a_step, server.engine.delay_s = 20, 0.01
    page.say("Hello")
    page.until(lambda: len(page.all("#messages .assistant > .body > p")) > 5)
    page.script("window.kept = document.querySelector('#messages .assistant > .body > p')")
    page.idle()
    assert page.script("return kept.isConnected") and len(page.all("#messages .assistant > .body > p")) == 61


GROWN = """
    const [text, done] = arguments;
    import("/page/markdown.js").then(({ GrowingText }) => {
      const shown = (step) => {
        const box = document.createElement("div"), growing = new GrowingText(box);
        for (let n = step; n < text.length; n += step) growing.show(text.slice(0, n));
        growing.show(text, true);
        return box.textContent + [...box.querySelectorAll("*")].map((each) => each.localName + (each.href ?? ""));
      };
      done([1, 7, 40, text.length].map(shown));
    });
"""


def test_a_text_that_grew_is_the_text_as_a_whole(page: WebPage) -> None:
    text = (
        MARKDOWN * 3
        + "\nA [late][one] link, \\[x\n\n+ y\\] and\r\n\r\n> a quotation\n\n[one]: https://example.org/late\n"
    )
    grown = page.driver.execute_async_script(GROWN, text)
    assert "https://example.org/late" in grown[-1]
    assert [each == grown[-1] for each in grown] == [True] * len(grown)
