"""Names and web pages that are answered: DNS rebinding, requests forged by other sites, CORS for allowed ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from serve_fakes import reply_to

from quire.core.errors import ConfigError
from quire.serve.config import ServerConfig
from quire.serve.http.hosts import binds_loopback

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}
EVIL = "http://evil.example"
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def canary(server: LiveServer) -> None:
    """The server goes on, for a client that is no browser."""
    key = server.config.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = HTTP.post(server.base + TEXT, json=BODY, headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


def get(server: LiveServer, host: str, path: str = "/v1/models", **headers: str) -> httpx.Response:
    return HTTP.get(server.base + path, headers={"host": host, **headers})


def post(server: LiveServer, **headers: str | None) -> httpx.Response:
    """A completion, with headers named with underscores."""
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    return HTTP.post(server.base + TEXT, json=BODY, headers=given)


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


# ---- Host


LOOPBACK = ["localhost", "LOCALHOST", "localhost:9", "localhost.", "quire.localhost", "127.0.0.1", "127.0.0.1:80",
            "127.3.2.1", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]"]  # fmt: skip
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "xlocalhost", "127.0.0.1.evil.example",
          "192.168.1.5", "0.0.0.0", "[::2]", "[::]", "1270.0.0.1", "a" * 255]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_server_on_loopback_answers_under_loopback_names(server: Any, host: str) -> None:
    assert get(server, host).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
def test_a_rebound_name_gets_nothing(server: Any, host: str) -> None:
    """The attack: evil.example resolves to 127.0.0.1, so that its page is of the same origin as this server."""
    for path in ("/v1/models", "/", "/metrics", "/openapi.json", "/nothing"):
        answer = get(server, host, path)
        assert answer.status_code == 421 and code(answer) == "host_not_allowed", path
        assert "--allowed-hosts" in answer.text and len(answer.text) < 600
    n_before = len(server.engine.submitted)
    answer = post(server, host=host, origin=f"http://{host}", sec_fetch_site="same-origin")
    assert answer.status_code == 421 and len(server.engine.submitted) == n_before
    assert get(server, host, "/health").status_code == 200, "a balancer asks under whatever name it has"
    canary(server)


def test_the_host_of_an_absolute_target_counts(server: Any) -> None:
    """RFC 9112, section 3.2.2: the Host header is ignored then."""
    for target, status in ((b"http://evil.example/v1/models", b" 421 "), (b"http://localhost:1/v1/models", b" 200 "),
                           (b"http://u@localhost/v1/models", b" 400 "), (b"http:///v1/models", b" 400 "),
                           (b"HTTP://LOCALHOST/v1/models?x", b" 200 "), (b"http://localhost?x", b" 200 ")):  # fmt: skip
        reply = server.exchange(b"GET %b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % target)
        assert status in reply[:14], (target, reply)


def test_http_1_0_needs_no_host(server: Any) -> None:
    assert server.exchange(b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert server.exchange(b"GET /v1/models HTTP/1.0\r\nhost: evil.example\r\n\r\n").startswith(b"HTTP/1.1 421 ")


def test_names_that_were_allowed(make_server: Any) -> None:
    server = make_server(allowed_hosts=["API.example.com", "*.inner.example", "10.1.2.3", "fd00::7"])
    for host in ("api.example.com", "Api.Example.Com.:80", "a.inner.example", "a.b.inner.example", "10.1.2.3:9",
                 "[fd00::7]", "[fd00:0::0007]:1", "localhost"):  # fmt: skip
        assert get(server, host).status_code == 200, host
    for host in ("example.com", "inner.example", "xinner.example", "10.1.2.4", "[fd00::8]"):
        assert get(server, host).status_code == 421, host
    assert get(make_server(allowed_hosts=["*"]), "evil.example").status_code == 200


def test_a_public_address_answers_under_every_name_unless_told_otherwise(make_server: Any) -> None:
    server = make_server(host="0.0.0.0", api_key="k")
    assert get(server, "evil.example", authorization="Bearer k").status_code == 200
    told = make_server(host="0.0.0.0", api_key="k", allowed_hosts=["api.example.com"])
    assert get(told, "evil.example", authorization="Bearer k").status_code == 421
    assert get(told, "api.example.com", authorization="Bearer k").status_code == 200
    assert get(told, "evil.example").status_code == 421, "the name is looked at before the key"
    for each in (server, told):
        canary(each)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"allowed_hosts": ["http://x"]}, "allowed_hosts"), ({"allowed_hosts": ["x:80"]}, "allowed_hosts"),
        ({"allowed_hosts": [""]}, "allowed_hosts"), ({"allowed_hosts": ["a.*.b"]}, "allowed_hosts"),
        ({"allowed_origins": ["app.example.com"]}, "allowed_origins"), ({"allowed_origins": ["null"]}, "null"),
        ({"allowed_origins": ["https://app.example.com/"]}, "allowed_origins"),
        ({"allowed_origins": ["https://a, https://b"]}, "allowed_origins"),
        ({"allowed_methods": ["GET, POST"]}, "allowed_methods"), ({"allowed_headers": ["x:y"]}, "allowed_headers"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "allow_credentials"),
    ],
)  # fmt: skip
def test_values_that_match_nothing_are_refused_at_start(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ServerConfig(**options).verify()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("", False), ("192.168.1.5", False), ("name.invalid", False)],
)  # fmt: skip
def test_which_addresses_are_loopback(host: str, expected: bool) -> None:
    assert binds_loopback(host) is expected
    assert ServerConfig(host=host).is_public is not expected


# ---- Origin


def test_another_page_changes_nothing(server: Any) -> None:
    """Multipart and text/plain too, which browsers send across origins without asking first."""
    n_before = len(server.engine.submitted)
    base, port = server.base, server.port
    for headers in ({"origin": EVIL}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
                    {"sec-fetch-site": "same-site"}, {"origin": f"https://127.0.0.1:{port}"},
                    {"origin": "http://127.0.0.1:1"}, {"origin": f"http://localhost:{port}"},
                    {"origin": base, "sec-fetch-site": "cross-site"}, {"origin": base + "/"}):  # fmt: skip
        for method, path in (("POST", TEXT), ("DELETE", "/v1/files/file-x"), ("POST", "/v1/batches/batch_x/cancel"),
                             ("PUT", "/nothing"), ("POST", "/health")):  # fmt: skip
            answer = HTTP.request(method, server.base + path, json=BODY, headers=headers)
            assert answer.status_code == 403 and code(answer) == "origin_not_allowed", (headers, path)
            assert "--allowed-origins" in answer.text
        as_text = {**headers, "content-type": "text/plain"}
        plain = HTTP.post(server.base + TEXT, content=json.dumps(BODY), headers=as_text)
        form = HTTP.post(server.base + "/v1/files", data={"purpose": "batch"}, files={"file": b"{}"}, headers=headers)
        assert plain.status_code == form.status_code == 403
        assert not any(name.startswith("access-control") for name in plain.headers)
    two = [("origin", server.base), ("origin", server.base)]
    assert HTTP.post(server.base + TEXT, json=BODY, headers=two).status_code == 403
    assert len(server.engine.submitted) == n_before
    assert HTTP.get(server.base + "/v1/files").json()["data"] == []
    canary(server)


def test_the_own_page_goes_on_working(server: Any) -> None:
    """Also where its port is another one outside, and where a proxy takes TLS away or says another Host."""
    port = server.port
    for headers in (
        {"origin": server.base, "sec_fetch_site": "same-origin"},
        {"origin": server.base},
        {"host": "localhost:9000", "origin": "http://localhost:9000"},
        {"host": "localhost", "origin": "http://localhost:80"},
        {"host": f"[::1]:{port}", "origin": f"http://[::1]:{port}"},
        {"host": "localhost", "origin": "https://api.example.com", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {},
    ):
        assert post(server, **headers).status_code == 200, headers
    assert get(server, "localhost", origin=EVIL).status_code == 200, "reading is the browser's matter"


def test_the_page_behind_tls_of_its_own_proxy_can_be_allowed(make_server: Any) -> None:
    server = make_server(allowed_hosts=["api.example.com"], allowed_origins=["https://api.example.com"])
    assert post(server, host="api.example.com", origin="https://api.example.com").status_code == 200


def test_allowed_pages_are_answered_as_cors_wants_it(make_server: Any) -> None:
    page = "https://app.example.com"
    server = make_server(allowed_origins=["https://App.example.com:443"], api_key="k")
    asked = {"origin": page, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization,content-type,x-stainless-lang"}  # fmt: skip
    preflight = HTTP.options(server.base + TEXT, headers=asked)
    assert preflight.status_code == 204 and not preflight.content, "it carries no key"
    assert "content-length" not in preflight.headers and "transfer-encoding" not in preflight.headers
    assert preflight.headers["access-control-allow-origin"] == page and preflight.headers["vary"] == "origin"
    assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    key = {"authorization": "Bearer k", "origin": page, "sec-fetch-site": "cross-site"}
    good = HTTP.post(server.base + TEXT, json=BODY, headers=key)
    bad = HTTP.post(server.base + TEXT, json={**BODY, "n": -1}, headers=key)
    with HTTP.stream("POST", server.base + TEXT, json={**BODY, "stream": True}, headers=key) as streamed:
        streamed.read()
    keyless = HTTP.post(server.base + TEXT, json=BODY, headers={"origin": page})
    assert [answer.status_code for answer in (good, bad, streamed, keyless)] == [200, 400, 200, 401]
    for answer in (good, bad, streamed, keyless):
        assert answer.headers["access-control-allow-origin"] == page
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for other in (EVIL, "https://app.example.com:444", "http://app.example.com", "https://xapp.example.com", "null"):
        refused = HTTP.options(server.base + TEXT, headers={**asked, "origin": other})
        assert refused.status_code == 401 and "access-control-allow-origin" not in refused.headers
    canary(server)


def test_methods_headers_and_credentials_are_as_told(make_server: Any) -> None:
    page = "https://app.example.com"
    server = make_server(
        allowed_origins=[page], allowed_methods=["get", "POST"], allowed_headers=["Authorization"],
        allow_credentials=True,
    )  # fmt: skip
    asked = {"origin": page, "access-control-request-method": "DELETE", "access-control-request-headers": "x-odd"}
    preflight = HTTP.options(server.base + TEXT, headers=asked)
    assert preflight.headers["access-control-allow-methods"] == "GET, POST"
    assert preflight.headers["access-control-allow-headers"] == "Authorization, Content-Type"
    answer = HTTP.post(server.base + TEXT, json=BODY, headers={"origin": page})
    assert answer.status_code == 200
    for each in (preflight, answer):
        assert each.headers["access-control-allow-credentials"] == "true"
        assert each.headers["access-control-allow-origin"] == page
    evil = HTTP.get(server.base + "/v1/models", headers={"origin": EVIL})
    assert "access-control-allow-credentials" not in evil.headers


def test_preflights_echo_nothing_odd(make_server: Any) -> None:
    server = make_server(allowed_origins=["*"])
    for odd in ("x y", "x\ty", "é", "x" * 5000, "a:b", "<script>", ""):
        asked: dict[str, Any] = {"origin": EVIL, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = odd.encode()
        answer = HTTP.options(server.base + TEXT, headers=asked)
        assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
    assert post(server, origin=EVIL, sec_fetch_site="cross-site").status_code == 200
    assert post(server, origin="null").status_code == 200
    assert HTTP.options(server.base + TEXT).status_code == 405, "no preflight"
