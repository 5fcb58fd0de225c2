"""One reading of a request: its path for key, dialect, route and labels alike; HTTP/1.0; answers without a body."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from serve_fakes import reply_to

from quire.serve.app import OPEN_PATHS, ROUTES
from quire.serve.config import ServerConfig
from quire.serve.page.assets import FILES

KEY = "secret-key"
TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}
PATHS = sorted({re.sub(r"{.*?}", "fake", path) for _, path, _ in ROUTES} | set(FILES))


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig(port=0, api_key=KEY, data_dir=str(tmp_path_factory.mktemp("data")))).start()
    yield server
    canary(server)
    server.stop()


def canary(server: LiveServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(server.base + TEXT, json=BODY, headers=headers, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


def ask(server: LiveServer, target: str | bytes, *, key: bool, method: str = "GET") -> tuple[int, bytes]:
    """Status and body, whatever the target."""
    target = target.encode() if isinstance(target, str) else target
    fields = b"host: localhost\r\nconnection: close\r\n" + b"authorization: Bearer %b\r\n" % KEY.encode() * key
    reply = server.exchange(b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target, fields))
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


def disguises(path: str) -> list[str]:
    """Other spellings that some server or other takes for `path`."""
    first = path.rstrip("/") or "/"
    found = [first.replace("/", "%2f"), first.replace("/", "%2F", 1), first.replace("/", "//", 1), "/." + first,
             "/x/.." + first, "/%2e" + first, first + "/", first + "/.", first + ";x", first + "%00", first + "%20",
             first + "%0a", first + "%3f", first + "%23", first.replace("/", "\\"), "/" + first + "?"]  # fmt: skip
    if path != "/":
        found += [first.upper(), first.title(), first[:-1] + f"%{ord(first[-1]):02x}", first + "%c3%a9",
                  f"/%{ord(first[1]):02x}" + first[2:], f"/%25{ord(first[1]):02x}" + first[2:]]  # fmt: skip
    return [each for each in found if each != path and each.startswith("/") and not each.startswith("/v1/models/")]


@pytest.mark.parametrize("path", PATHS)
def test_every_disguise_of_a_path_leads_nowhere(locked: LiveServer, path: str) -> None:
    """Without the key 401, with it 404: for an open path as for any other, so that nothing passes one check as this
    path and the next as another."""
    for other in disguises(path):
        assert ask(locked, other, key=False)[0] == 401, other
        assert ask(locked, other, key=True)[0] == 404, other


def test_what_is_open_is_open_by_its_one_name(locked: LiveServer) -> None:
    for path in OPEN_PATHS:
        for target in (path, path + "?x", path + "?", f"http://localhost{path}"):
            assert ask(locked, target, key=False)[0] == 200, target


@pytest.mark.parametrize(
    "target", ["*", "version", "?x", "a:80", "//", "http:/version", "ftp://localhost/version", "/version#x", "#",
               "http://localhost/version#x", b"/versi\xc3\xb3n", b"/\xff", b"/version\x00", b"/ver\tsion"],
)  # fmt: skip
def test_what_is_no_target_is_refused(locked: LiveServer, target: str | bytes) -> None:
    status, body = ask(locked, target, key=True)
    assert status == (404 if target == "//" else 400) and json.loads(body)["error"]["message"]
    assert ask(locked, "*", key=True, method="OPTIONS")[0] == 404


def test_dialect_route_and_label_are_of_the_same_path(locked: LiveServer) -> None:
    """An Anthropic path in disguise is none: no x-api-key, no Anthropic error, no such label."""

    def post(target: bytes) -> bytes:
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\nx-api-key: %b\r\n" % (target, KEY.encode())
        return locked.exchange(
            head + b"connection: close\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )

    assert b" 400 " in post(b"/v1/messages")[:14] and b'"type":"error"' in post(b"http://localhost/v1/messages?x")
    for other in (b"/v1%2fmessages", b"/v1/%6dessages", b"//v1/messages", b"/v1/messages;x", b"/V1/messages"):
        reply = post(other)
        assert b" 401 " in reply[:14] and b'"error":{"message"' in reply, other
    reply = post(b"/v1/messages/../models")
    assert b" 404 " in reply[:14] and b'"type":"error"' in reply
    metrics = httpx.get(locked.base + "/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert set(re.findall(r'handler="([^"]*)"', metrics)) <= {"other", *FILES, *(path for _, path, _ in ROUTES)}


def test_names_of_models_may_be_escaped(make_server: Any) -> None:
    """A parameter is data: clients escape the slash of a model's name or do not."""
    server = make_server()
    server.state._limits = dataclasses.replace(server.state.limits, model_names=("org/name", "fake"))
    cases = {"org/name": 200, "org%2Fname": 200, "%66ake": 200, "org%2fx": 404, "%ff%00": 404, "../x": 404}
    for name, status in cases.items():
        assert ask(server, f"/v1/models/{name}", key=False)[0] == status, name
    assert b"\\x00" in ask(server, "/v1/models/a%00b", key=False)[1]


# ---- HTTP/1.0


def old(method: str, path: str, body: dict[str, Any] | None = None, *fields: bytes) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    lines = [b"%b %b HTTP/1.0" % (method.encode(), path.encode()), b"host: localhost", *fields]
    lines += [b"content-type: application/json", b"content-length: %d" % len(data)] if data else []
    return b"\r\n".join([*lines, b"", data])


def test_http_1_0_gets_raw_bodies(server: Any) -> None:
    """Whole and streamed: no chunks, and the end of the connection is the end of the body."""
    whole = server.exchange(old("POST", TEXT, BODY, b"connection: keep-alive", b"expect: 100-continue"))
    head, _, body = whole.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head and b"transfer-encoding" not in head
    assert json.loads(body)["choices"][0]["text"] == reply_to([5, 6])[:30]
    assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(body)  # type: ignore[index]
    for path, field in ((TEXT, {}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
        fields = {**BODY, "stream": True, **field}
        fields.pop("prompt" if field else "") if field else None
        head, _, body = server.exchange(old("POST", path, fields)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
        events = body.split(b"\n\n")
        assert events.pop() == b"" and events.pop() == b"data: [DONE]"
        assert all(json.loads(event.removeprefix(b"data: "))["choices"] is not None for event in events)


def test_http_1_0_errors_and_files(server: Any) -> None:
    for request, status in ((old("GET", "/nothing"), 404), (old("GET", "/"), 200), (old("GET", "/metrics"), 200),
                            (old("POST", TEXT, {"model": "fake"}), 400), (old("DELETE", "/version"), 405)):  # fmt: skip
        head, _, body = server.exchange(request).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"%d" % status and b"transfer-encoding" not in head
        assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(body) > 0  # type: ignore[index]


def test_only_one_request_of_http_1_0_is_taken(server: Any) -> None:
    assert server.exchange(old("GET", "/version") * 3).count(b"HTTP/1.1 200") == 1


# ---- no body


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_head_and_not_modified_have_no_body(server: Any, version: bytes) -> None:
    def ask(method: bytes, path: bytes, field: bytes = b"") -> tuple[bytes, bytes]:
        fields = b"host: localhost\r\nconnection: close\r\n" + field
        reply = server.exchange(b"%b %b HTTP/%b\r\n%b\r\n" % (method, path, version, fields))
        head, _, body = reply.partition(b"\r\n\r\n")
        return head, body

    for path in (b"/", b"/version", b"/metrics", b"/nothing", b"/v1/completions", b"/v1/models/x"):
        (head, none), (same, body) = ask(b"HEAD", path), ask(b"GET", path)
        assert none == b"" and body and b"transfer-encoding" not in head
        status, length = head.split(b" ")[1], re.search(rb"content-length: \d+", head)
        assert status == same.split(b" ")[1]
        assert path == b"/metrics" or (length and length[0] in same), path
    tag = re.search(rb'etag: ("\w+")', ask(b"GET", b"/")[0])
    head, body = ask(b"GET", b"/", b"if-none-match: %b\r\n" % tag[1])  # type: ignore[index]
    assert b" 304 " in head[:14] and body == b"" and b"content-length" not in head and b"transfer-" not in head


def test_head_with_broken_headers_gets_no_body(server: Any) -> None:
    reply = server.exchange(b"HEAD /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 431 ") and reply.endswith(b"\r\n\r\n") and b"{" not in reply


# ---- fields


def test_labels_of_clients_are_echoed_only_if_they_are_plain(server: Any) -> None:
    for label, is_echoed in ((b"abc-1.2:3/x_y", True), (b"x" * 128, True), (b"x" * 129, False), (b"a b", False),
                             (b"a;b", False), (b"\xc3\xa9", False), (b"<script>", False), (b"", False)):  # fmt: skip
        reply = server.exchange(
            b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: %b\r\n\r\n" % label
        )
        assert (b"x-client-request-id: " in reply) is is_echoed and (label in reply or not is_echoed)
    twice = (
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: aa\r\nx-request-id: aa\r\n\r\n"
    )
    assert b"x-client-request-id" not in server.exchange(twice)
    for split in (b"a\rset-cookie: b", b"a\nset-cookie: b", b"a\r\n\tset-cookie: b", b"a\x00b", b"a\x1bb", b"a\x7fb"):
        reply = server.exchange(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx-request-id: %b\r\n\r\n" % split)
        assert reply.startswith(b"HTTP/1.1 400 ") and b"cookie" not in reply, split


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"content-type: application/json\r\ncontent-type: application/json\r\n", 415),
        (b"content-type: application/json\r\ncontent-type: text/plain\r\n", 415),
        (b"content-type: application/json, text/plain\r\n", 415), (b"", 415),
        (b"authorization: Bearer a\r\nauthorization: Bearer b\r\ncontent-type: application/json\r\n", 200),
        (b"expect: 200-maybe\r\ncontent-type: application/json\r\n", 200),
        (b"expect: 100-continue\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n", 200),
        (b"te: trailers, deflate\r\nconnection: te\r\ncontent-type: application/json\r\n", 200),
        (b"transfer-encoding: identity\r\ncontent-type: application/json\r\n", 400),
        (b"transfer-encoding: chunked, identity\r\ncontent-type: application/json\r\n", 400),
        (b"transfer-encoding: xchunked\r\ncontent-type: application/json\r\n", 400),
        (b"transfer-encoding : chunked\r\ncontent-type: application/json\r\n", 400),
        (b"content-length: 14\r\ncontent-type: application/json\r\n", 400),
        (b"content-length: +14\r\ncontent-type: application/json\r\n", 400),
        (b"content-type: application/json\r\n x: folded\r\n", 400),
        (b": x\r\ncontent-type: application/json\r\n", 400),
    ],
)  # fmt: skip
def test_doubled_and_odd_fields(server: Any, fields: bytes, status: int) -> None:
    body = b'{"prompt":"x"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + fields
    reply = server.exchange(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    last = [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", reply)][-1]
    assert last == status, reply
    assert httpx.get(server.base + "/health").status_code == 200
