"""What one connection can make the server hold, do and log: pipelines, silence, slow readers, odd ends of requests."""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, read_all
from serve_fakes import reply_to

from quire.serve.http import transport
from quire.serve.http.protocol import MAX_HELD_BYTES, PIECE_BYTES

PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}
HOST = b"host: localhost\r\n"
CLOSE = b"connection: close\r\n"
JSON = b"content-type: application/json\r\n"
LAST = b"GET /version HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n"
OFFER = b"connection: upgrade\r\nupgrade: websocket\r\n"
PROMPT = b'{"prompt":"x"}'
READ_AT_ONCE = 256 * 1024
"""What uvloop reads from a socket at most."""
N, N_BODIES = 10_000, 2_500


def canary(server: LiveServer) -> None:
    answer = httpx.post(server.base + PATH, json=BODY, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


@pytest.fixture
def watched(server: Any, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """The shared server; the canary comes after the case, and the log is empty."""
    others = connections(server)
    yield server
    server.engine.held = False
    canary(server)
    wait_for(lambda: set(connections(server)) <= set(others))
    assert not caplog.records, caplog.records[:3]


def connections(server: LiveServer) -> list[Any]:
    return list(server._http.server_state.connections)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def talk(server: LiveServer, data: bytes, seconds: float = 120.0) -> bytes:
    """Send and read at the same time, until the server closes. What it holds of it stays bounded."""
    received, sent, deadline_s = [], 0, time.monotonic() + seconds
    with server.connect() as connection, selectors.DefaultSelector() as selector:
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while True:
            assert time.monotonic() < deadline_s, f"{sent} of {len(data)} bytes sent"
            for _, events in selector.select(1):
                if events & selectors.EVENT_WRITE:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        sent += connection.send(data[sent : sent + 65536])
                    if sent == len(data):
                        selector.modify(connection, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    try:
                        piece = connection.recv(1 << 20)
                    except ConnectionError:
                        return b"".join(received)
                    if not piece:
                        return b"".join(received)
                    received.append(piece)
                    check_state(server)


def check_state(server: LiveServer) -> None:
    for protocol in connections(server):
        assert len(protocol.pipeline) <= PIECE_BYTES // 18, "18 bytes are the shortest request"
        assert len(protocol._held) <= MAX_HELD_BYTES + READ_AT_ONCE


def statuses(reply: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", reply)]


def post(*fields: bytes, body: bytes = PROMPT) -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"".join(fields) + length + b"\r\n" + body


# ---- pipelines

CHUNKED = b"e\r\n" + PROMPT + b"\r\n0\r\n\r\n"
KINDS: dict[str, tuple[bytes, list[int]]] = {
    "health": (b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "offers": (b"GET /health HTTP/1.1\r\n" + HOST + OFFER + b"\r\n", [200]),
    "offers with a body": (post(OFFER), [200]),
    "errors": (b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n", [404]),
    "forbidden": (b"DELETE /x HTTP/1.1\r\n" + HOST + b"origin: http://evil\r\n\r\n", [403]),
    "HEAD": (b"HEAD /version HTTP/1.1\r\n" + HOST + b"\r\n", [200]),
    "continue": (post(b"expect: 100-continue\r\n"), [100, 200]),
    "chunked": (b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED, [200]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_requests_on_one_connection(watched: Any, kind: str) -> None:
    request, expected = KINDS[kind]
    n = N_BODIES if request.startswith(b"POST") else N
    reply = talk(watched, request * n + LAST)
    assert statuses(reply) == [*expected * n, 200], "each has its answer, in its turn"


@pytest.mark.parametrize("first", [b"\r\n" * 10, b"GET / HTTP/1.0\r\n\r\n", b"FOO\r\n\r\n", b"GET /x\r\n\r\n",
                                   b"GET /version HTTP/1.1\r\nx: \x00\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"])  # fmt: skip
def test_ten_thousand_bad_heads(watched: Any, first: bytes) -> None:
    """One answer, then the end; blank lines before a request are none."""
    found = statuses(talk(watched, first * N + LAST))
    assert found in ([200], [400], [431])


def test_a_good_request_before_a_bad_one_is_answered(watched: Any) -> None:
    """Its own answer, whole, then that of the bad one."""
    for good in (KINDS["health"][0], post()):
        for count in (1, 5):
            reply = talk(watched, good * count + b"\x00garbage\r\n\r\n" * 3)
            assert statuses(reply) == [200] * count + [400], reply


def test_what_waits_behind_a_stream_is_bounded(make_server: Any) -> None:
    server = make_server(sse_keep_alive=0.05)
    server.engine.held = True
    with server.connect() as connection:
        stream = b'{"model":"fake","prompt":"x","max_tokens":4,"stream":true}'
        connection.sendall(post(body=stream).replace(b"/tokenize", PATH.encode()))
        connection.setblocking(False)
        sent, end_s = 0, time.monotonic() + 2
        while time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                sent += connection.send(KINDS["health"][0] * 1000)
            check_state(server)
            time.sleep(0.001)
        assert sent > MAX_HELD_BYTES + READ_AT_ONCE, "the kernel's buffers are full"
        server.engine.held = False
        connection.settimeout(60)
        received = b""
        while received.count(b'{"status":"ok"}') < 5000:
            received += connection.recv(1 << 20)
            check_state(server)
    assert received.index(b"[DONE]") < received.index(b'"ok"')
    canary(server)


def test_a_client_that_leaves_behind_a_little_pipelining_is_noticed(server: Any) -> None:
    server.engine.held, others = True, connections(server)
    with server.connect() as connection:
        body = b'{"model":"fake","prompt":"x","max_tokens":4}'
        connection.sendall(post(body=body).replace(b"/tokenize", PATH.encode()) + KINDS["health"][0] * 100)
        wait_for(lambda: server.state.live)
    wait_for(lambda: not server.state.live and set(connections(server)) <= set(others))


# ---- silence and slowness


def test_blank_lines_do_not_hold_a_connection(make_server: Any) -> None:
    server = make_server(keep_alive_timeout=0.5, header_timeout=0.5)
    with server.connect() as fresh, server.connect() as used:
        used.sendall(KINDS["health"][0])
        assert used.recv(4096)
        for _ in range(3):
            fresh.sendall(b"\r\n")
            used.sendall(b"\r\n")
        wait_for(lambda: not connections(server))
        assert statuses(read_all(fresh)) == [408] and read_all(used) == b""
    canary(server)


def test_a_slow_head_behind_an_answer_is_closed(make_server: Any) -> None:
    server = make_server(header_timeout=0.3, keep_alive_timeout=60)
    with server.connect() as connection:
        connection.sendall(KINDS["health"][0] + b"GET /ver")
        assert statuses(read_all(connection)) == [200, 408]


def test_a_client_that_does_not_read_whole_answers_is_cut_off(make_server: Any) -> None:
    server = make_server(write_timeout=0.4)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.setblocking(False)
        request = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
        with pytest.raises(ConnectionError):
            for _ in range(4000):
                with contextlib.suppress(BlockingIOError):
                    connection.send(request * 1000)
                check_state(server)
                time.sleep(0.01)
    wait_for(lambda: not connections(server) and not server._http.server_state.tasks)
    canary(server)


def test_a_client_that_reads_slowly_gets_everything(make_server: Any) -> None:
    """More than `write_timeout` in all, never without some progress in it."""
    server = make_server(write_timeout=0.5)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(("127.0.0.1", server.port))
        request = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
        connection.sendall(request * 150 + LAST)
        received, last_s = b"", time.monotonic()
        while piece := connection.recv(65536):
            received += piece
            time.sleep(max(0.0, 0.03 - (time.monotonic() - last_s)))
            last_s = time.monotonic()
    assert statuses(received) == [200] * 151 and len(received) > 3_000_000
    canary(server)


def test_unread_answers_do_not_hold_a_closed_connection(make_server: Any) -> None:
    server = make_server(write_timeout=0.4, keep_alive_timeout=0.3)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall((b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n") * 1000 + LAST)
        wait_for(lambda: server._http.server_state.tasks)
        wait_for(lambda: not connections(server) and not server._http.server_state.tasks)
    canary(server)


# ---- ends of requests


def test_a_refused_upload_is_told_why(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes on sending for a while: that is thrown away, so that no reset takes the answer from it."""
    monkeypatch.setattr(transport, "LINGER_S", 20.0)
    server = make_server(max_body_bytes=1024, api_key="k")
    for key, status in ((b"", 401), (b"authorization: Bearer k\r\n", 413)):
        with server.connect() as connection:
            connection.sendall(post(key, b"", body=b"x" * 30_000_000))
            assert statuses(read_all(connection)) == [status], "everything was sent, then the answer was read"


def test_a_refused_upload_does_not_hold_the_connection(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER_S", 0.3)
    server = make_server(max_body_bytes=1024)
    with server.connect() as connection:
        connection.sendall(post(body=b"x" * 1_000_000)[:-10])
        wait_for(lambda: server._http.server_state.total_requests)
        wait_for(lambda: not connections(server))
        assert statuses(read_all(connection)) == [413]


def test_nothing_of_a_refused_body_is_taken_for_a_request(server: Any) -> None:
    smuggled = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"
    for field in (b"content-encoding: gzip\r\n", b"content-type: text/plain\r\n", b"origin: http://evil\r\n"):
        reply = talk(server, post(field, body=smuggled * 3) + smuggled)
        assert len(statuses(reply)) == 1 and statuses(reply)[0] in (403, 415) and b"connection: close" in reply


def test_trailers_are_not_headers(server: Any, make_server: Any) -> None:
    head = b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"transfer-encoding: chunked\r\n"
    trailers = b"x-request-id: mine\r\ncontent-type: text/plain\r\nhost: evil\r\nx: y\r\n"
    chunks = CHUNKED.removesuffix(b"\r\n")
    reply = talk(server, (head + b"\r\n" + chunks + trailers + b"\r\n") * 3 + LAST)
    assert statuses(reply) == [200] * 4 and b"mine" not in reply
    locked = make_server(api_key="k")
    reply = talk(locked, head + b"\r\n" + chunks + b"authorization: Bearer k\r\n\r\n")
    assert statuses(reply) == [401]
    canary(server)


@pytest.mark.parametrize("endless", ["0\r\nx: ", "0\r\nx", "1;", "1;x=", "0;", ""], ids=repr)
def test_endless_ends_of_chunks_are_bounded(make_server: Any, endless: str) -> None:
    """A trailer, or a chunk's extension, that never comes to its end: the parser keeps it, or waits for its end."""
    server = make_server()
    with server.connect() as connection:
        head = b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
        connection.sendall(head + endless.encode())
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                connection.sendall(b"0" * 4096)
        assert statuses(read_all(connection)) in ([400], [431])
    wait_for(lambda: not server.state.live)
    canary(server)


def test_trailers_count_as_headers_do(server: Any) -> None:
    head = b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON + b"transfer-encoding: chunked\r\n\r\n"
    for trailers in (b"x: y\r\n" * 200, b"x: %b\r\n" % (b"y" * 1000) * 50):
        assert statuses(talk(server, head + CHUNKED.removesuffix(b"\r\n") + trailers + b"\r\n")) == [431]


def test_offers_keep_what_else_the_connection_header_says(server: Any) -> None:
    for words, n_answers in ((b"upgrade, close", 1), (b"Close , Upgrade,HTTP2-Settings", 1), (b"upgrade", 2)):
        offer = b"connection: " + words + b"\r\nupgrade: h2c\r\nhttp2-settings: x\r\n"
        reply = talk(server, b"GET /version HTTP/1.1\r\n" + HOST + offer + b"\r\n" + LAST)
        assert statuses(reply) == [200] * n_answers, words
    old = b"GET /version HTTP/1.0\r\n" + HOST + OFFER + b"\r\n"
    assert statuses(talk(server, old)) == [200]
