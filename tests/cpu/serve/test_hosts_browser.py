"""The attacks on names and origins in headless Chromium, which sends what browsers send."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import reply_to

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")

ASK = """
const [url, options, done] = arguments;
fetch(url, options)
  .then(async (answer) => [answer.type, answer.status, await answer.text()])
  .then(done, (error) => done(["error", 0, String(error)]));
"""
BODY = '{"model":"fake","prompt":[5,6],"max_tokens":30}'


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """Every name below `example` is this machine: what a rebound name is to a browser."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP *.example 127.0.0.1"):
        options.add_argument(flag)
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    started.set_script_timeout(60)
    yield started
    started.quit()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """No lines among those of the tests."""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of another server, whose page is the attacker's."""
    folder: Path = tmp_path_factory.mktemp("elsewhere")
    (folder / "index.html").write_text("<!doctype html><title>elsewhere</title>")
    handler = functools.partial(_Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def ask(driver: Any, url: str, **options: Any) -> tuple[str, int, str]:
    """What a page's fetch() comes to: the answer's type (opaque: unreadable), status, text."""
    kind, status, text = driver.execute_async_script(ASK, url, options)
    return kind, status, text


def simple(content_type: str) -> dict[str, Any]:
    """A POST that a browser sends across origins without asking first."""
    return {"method": "POST", "mode": "no-cors", "headers": {"content-type": content_type}, "body": BODY}


def test_a_rebound_name_gets_nothing(driver: Any, server: Any) -> None:
    n_before = len(server.engine.submitted)
    driver.get(f"http://evil.example:{server.port}/")
    assert "host_not_allowed" in driver.page_source and "--allowed-hosts evil.example" in driver.page_source
    json = {"method": "POST", "headers": {"content-type": "application/json"}, "body": BODY}
    assert ask(driver, "/v1/completions", **json)[1] == 421, "of the same origin as the page, and still"
    assert ask(driver, "/v1/models")[1] == 421
    assert len(server.engine.submitted) == n_before


def test_another_page_changes_nothing(driver: Any, server: Any, elsewhere: int) -> None:
    """Of another site, and of another port of the same machine."""
    n_before, seen = len(server.engine.submitted), answers(server)
    for name in ("evil.example", "localhost", "127.0.0.1"):
        driver.get(f"http://{name}:{elsewhere}/")
        assert driver.title == "elsewhere"
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            for path in ("/v1/completions", "/v1/files", "/tokenize"):
                assert ask(driver, server.base + path, **simple(content_type))[0] in ("opaque", "error")
        headers = {"content-type": "application/json"}
        assert ask(driver, server.base + "/v1/completions", method="POST", headers=headers, body=BODY)[0] == "error"
        assert ask(driver, server.base + "/v1/models")[0] == "error", "it cannot be read"
    assert len(server.engine.submitted) == n_before
    found = {key: n - seen.get(key, 0) for key, n in answers(server).items()}
    assert not any(n for (_, method, status), n in found.items() if method == "POST" and status != "403"), found
    assert sum(n for (_, method, status), n in found.items() if (method, status) == ("POST", "403")) > 0


def test_an_allowed_page_is_served(driver: Any, make_server: Any, elsewhere: int) -> None:
    server = make_server(allowed_origins=[f"http://app.example:{elsewhere}"], api_key="k")
    headers = {"content-type": "application/json", "authorization": "Bearer k"}
    url = server.base.replace("127.0.0.1", "localhost") + "/v1/completions"
    driver.get(f"http://app.example:{elsewhere}/")
    kind, status, text = ask(driver, url, method="POST", headers=headers, body=BODY)
    assert (kind, status) == ("cors", 200) and reply_to([5, 6])[:30] in text
    assert ask(driver, url, method="POST", headers={**headers, "authorization": "Bearer x"}, body=BODY)[1] == 401
    driver.get(f"http://other.example:{elsewhere}/")
    assert ask(driver, url, method="POST", headers=headers, body=BODY)[0] == "error"


def test_the_own_page_works_under_each_of_its_names(driver: Any, make_server: Any) -> None:
    server = make_server(allowed_hosts=["quire.example"])
    json = {"method": "POST", "headers": {"content-type": "application/json"}, "body": BODY}
    for name in ("localhost", "127.0.0.1", "quire.example", "quire.localhost"):
        driver.get(f"http://{name}:{server.port}/")
        kind, status, text = ask(driver, "/v1/completions", **json)
        assert (kind, status) == ("basic", 200) and reply_to([5, 6])[:30] in text, name


def answers(server: Any) -> dict[tuple[str, str, str], int]:
    """HTTP answers so far, by route, method and status."""
    return dict(server.state.metrics._answers)
