"""Connections: broken HTTP (H), clients that leave or stop reading (D), keep-alives, shutdown of what runs."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from live_server import read_all
from serve_fakes import reply_to

BODY = b'{"model":"fake","prompt":"x","max_tokens":4}'


def post(path: str, body: bytes, *headers: bytes, length: bool = True) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: localhost", b"content-type: application/json", *headers]
    if length:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.005)


def statuses(reply: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", reply)]


def check_refused(reply: bytes, *allowed: int) -> None:
    """One error answer in JSON with an id, or several statuses for pipelined requests; then the end."""
    head, _, body = reply.partition(b"\r\n\r\n")
    assert statuses(reply)[:1] and statuses(reply)[0] in allowed, reply[:200]
    assert b"x-request-id: req_" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


# ---- broken HTTP

TOO_LONG = b"content-length: 99999999"
GET = b"GET /version HTTP/1.1\r\n"
HOST = b"host: localhost\r\n"
BROKEN: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "H01 one header of 1 MB": (GET + b"host: localhost\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n", (431,)),
    "H01 long, unfinished": (GET + b"host: localhost\r\nx: " + b"y" * 200_000, (431,)),
    "H01 in small headers": (GET + b"".join(b"x%d: %s\r\n" % (i, b"y" * 1000) for i in range(60)) + b"\r\n", (431,)),
    "H01 path of 1 MB": (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", (431,)),
    "H02 5,000 headers": (GET + HOST + b"".join(b"x%d: 1\r\n" % i for i in range(5000)) + b"\r\n", (431,)),
    "H04 length and chunked": (post("/tokenize", b"0\r\n\r\n", b"transfer-encoding: chunked"), (400,)),
    "H05 two lengths": (post("/tokenize", BODY, b"content-length: 3"), (400,)),
    "H06 length -1": (post("/tokenize", BODY, b"content-length: -1", length=False), (400,)),
    "H06 length abc": (post("/tokenize", BODY, b"content-length: abc", length=False), (400,)),
    "H06 length 1e22": (post("/tokenize", BODY, b"content-length: 10000000000000000000000", length=False), (400, 413)),
    "H07 length over the limit": (post("/tokenize", b"", TOO_LONG, length=False), (413,)),
    "H09 bad chunk size": (post("/tokenize", b"zz\r\nabc\r\n", b"transfer-encoding: chunked", length=False), (400,)),
    "H12 no host": (GET + b"\r\n", (400,)),
    "H12 two hosts": (GET + b"host: localhost\r\nhost: b\r\n\r\n", (400,)),
    "H12 host with a path": (GET + b"host: a/b\r\n\r\n", (400,)),
    "H12 host with a user": (GET + b"host: u@a\r\n\r\n", (400,)),
    "H13 unknown method": (b"BREW /version HTTP/1.1\r\nhost: localhost\r\n\r\n", (400, 405)),
    "H13 lower-case method": (b"get /version HTTP/1.1\r\nhost: localhost\r\n\r\n", (400, 405)),
    "H13 method of 10 kB": (b"A" * 10_000 + b" / HTTP/1.1\r\nhost: localhost\r\n\r\n", (400, 405)),
    "H18 expect with oversize": (post("/tokenize", b"", b"expect: 100-continue", TOO_LONG, length=False), (413,)),
    "NUL in a header": (GET + b"host: localhost\r\nx: \x00\r\n\r\n", (400,)),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), (400,)),
    "garbage": (b"\xff\xfe\xfd\r\n\r\n", (400,)),
    "connect": (b"CONNECT a:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", (400,)),
    "header name with a blank": (GET + b"host: localhost\r\nx y: 1\r\n\r\n", (400,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_refused_and_closed(server: Any, name: str) -> None:
    data, allowed = BROKEN[name]
    reply = server.exchange(data)
    check_refused(reply, *allowed)
    assert b"100 Continue" not in reply
    assert b"connection: close" in reply
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_an_offer_of_http2_is_ignored(server: Any) -> None:
    """Java's client offers h2c with its first request, and sends the body at once."""
    offer = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")
    with server.connect() as connection:
        connection.sendall(post("/v1/completions", BODY, *offer))
        assert b"text_completion" in connection.recv(4096)
        connection.sendall(GET + HOST + b"connection: close\r\n\r\n")
        assert statuses(read_all(connection)) == [200]
    websocket = (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: x", b"sec-websocket-version: 13")
    with server.connect() as connection:
        connection.sendall(post("/v1/completions", BODY, *websocket).replace(b"POST", b"GET", 1))
        assert statuses(connection.recv(4096)) == [405]


def test_silent_and_slow_heads_are_closed(make_server: Any) -> None:
    server = make_server(header_timeout=0.3, keep_alive_timeout=0.3)
    with server.connect() as silent, server.connect() as slow, server.connect() as reused:
        slow.sendall(b"GET /version HTT")
        reused.sendall(GET + HOST + b"\r\n")
        assert statuses(reused.recv(4096)) == [200]
        reused.sendall(GET[:5])
        began_s = time.monotonic()
        for connection in (silent, slow, reused):
            check_refused(read_all(connection), 408)
        assert time.monotonic() - began_s < 8
    with server.connect() as idle:
        idle.sendall(GET + HOST + b"\r\n")
        assert read_all(idle).count(b"HTTP/1.1") == 1, "an idle connection is closed without an answer"


def test_short_bodies_time_out(make_server: Any) -> None:
    server = make_server(body_timeout=0.3)
    with server.connect() as short, server.connect() as chunked:
        short.sendall(post("/v1/completions", BODY[:10], b"content-length: 100", length=False))
        chunked.sendall(post("/v1/completions", b'5\r\n{"mod\r\n', b"transfer-encoding: chunked", length=False))
        for connection in (short, chunked):
            check_refused(read_all(connection), 408)
    assert not server.engine.submitted


def test_chunked_bodies_count(make_server: Any) -> None:
    server = make_server(max_body_bytes=2048)
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    check_refused(server.exchange(post("/tokenize", chunk * 3, b"transfer-encoding: chunked", length=False)), 413)
    with server.client() as http:
        assert http.post(
            "/tokenize", content=iter([b'{"prompt":', b'"x"}']), headers={"content-type": "application/json"}
        ).is_success


def test_requests_in_a_row_on_one_connection(server: Any) -> None:
    with server.connect() as connection:
        connection.sendall((GET + HOST + b"\r\n") * 3 + GET + HOST + b"connection: close\r\n\r\n")
        assert statuses(read_all(connection)) == [200] * 4


# ---- clients that leave


def start(server: Any, *, stream: bool, n: int = 1, path: str = "/v1/completions", **fields: Any) -> socket.socket:
    body = {"model": "fake", "prompt": "x", "max_tokens": 2000, "n": n, "stream": stream, **fields}
    if path != "/v1/completions":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    connection: socket.socket = server.connect()
    connection.sendall(post(path, json.dumps(body).encode()))
    return connection


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_leaving_while_decoding_cancels_within_two_steps(server: Any, path: str, stream: bool, how: str) -> None:
    step_s = server.engine.delay_s = 0.05
    connection = start(server, stream=stream, path=path)
    wait_for(lambda: server.engine.running and server.engine.tokens_made.get(next(iter(server.engine.running)), 0) >= 2)
    request_id = next(iter(server.engine.running))
    made = server.engine.tokens_made[request_id]
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    wait_for(lambda: not server.engine.running, 4 * step_s)
    assert server.engine.tokens_made[request_id] <= made + 2
    wait_for(lambda: not server.state.live and not server.llm._streams)
    assert server.engine.cancelled.count(request_id) == 1
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue(server: Any, stream: bool) -> None:
    server.engine.held = True
    connections = [start(server, stream=stream, n=2, prompt=["a", "b"]) for _ in range(5)]
    wait_for(lambda: len(server.engine.running) == 10)
    for connection in connections:
        connection.close()
    wait_for(lambda: not server.engine.running and not server.state.live)


def test_leaving_after_the_last_token_ends_once(server: Any) -> None:
    for stream in (True, False):
        with start(server, stream=stream, max_tokens=3) as connection:
            connection.recv(200)
        wait_for(lambda: not server.engine.running and not server.state.live)
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_a_pipelined_request_learns_that_its_client_left(server: Any) -> None:
    server.engine.delay_s = 0.01
    with server.connect() as connection:
        body = b'{"model":"fake","prompt":"x","max_tokens":2000,"stream":true}'
        connection.sendall(post("/v1/completions", body) * 2)
        wait_for(lambda: server.engine.running)
    wait_for(lambda: not server.engine.running and not server.state.live)
    time.sleep(0.05)
    assert not server.engine.running, "the second request must not start for nobody"


def test_leaving_while_the_body_arrives(server: Any) -> None:
    for _ in range(10):
        with server.connect() as connection:
            connection.sendall(post("/v1/completions", BODY[:10], b"content-length: 100", length=False))
    with server.client() as http:
        assert http.get("/health").status_code == 200


def test_a_neighbour_keeps_its_bytes(server: Any) -> None:
    server.engine.delay_s = 0.002
    body = {"model": "fake", "prompt": "neighbour", "max_tokens": 60, "stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        for _ in range(8):
            start(server, stream=True).close()
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if line.startswith("data: {")
        )
    assert text == reply_to(server.llm.tokenizer.encode("neighbour"))[:60]


def test_a_client_that_stops_reading_is_cut_off(make_server: Any) -> None:
    server = make_server(write_timeout=0.5, sse_keep_alive=0.3)
    server.engine.text = "blah " * 800
    server.engine.tokens_a_step, server.engine.delay_s = 50, 0.2  # the last token is 16 s away
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = {"model": "fake", "prompt": ["x"] * 8, "max_tokens": 4000, "stream": True, "logprobs": 20, "n": 4}
    connection.sendall(post("/v1/completions", json.dumps(body).encode()))
    wait_for(lambda: server.engine.running)
    wait_for(lambda: server.state.live == set() and len(server.engine.cancelled) == 8)
    assert not server.llm._streams
    with server.client() as http:
        assert http.get("/health").status_code == 200
    connection.close()


def test_silence_is_filled_with_comments(make_server: Any) -> None:
    server = make_server(sse_keep_alive=0.1)
    server.engine.held = True
    with start(server, stream=True, max_tokens=2) as connection:
        received = b""
        while received.count(b": keep-alive\n\n") < 3:
            received += connection.recv(4096)
        server.engine.held = False
        while b"[DONE]" not in received:
            received += connection.recv(4096)
    assert b"data: {" in received


@pytest.mark.parametrize("stream", [True, False])
def test_engine_death(make_server: Any, stream: bool) -> None:
    server = make_server()
    server.engine.delay_s = 0.01
    with start(server, stream=stream) as connection:
        wait_for(lambda: server.engine.tokens_made)
        began_s = time.monotonic()
        server.call(server.engine.die)
        reply = b""
        while not reply.endswith((b"0\r\n\r\n", b"}}")):
            reply += connection.recv(65536)
        assert time.monotonic() - began_s < 10
    assert b"engine_dead" in reply and b"[DONE]" not in reply
    assert statuses(reply) == [200 if stream else 503]
    assert server.state.engine_lost.is_set()


def test_fault_in_a_stream_is_its_last_event(server: Any) -> None:
    server.engine.fault = lambda request: request.params.n == 2
    with server.client() as http:
        body = {"model": "fake", "prompt": ["a", "b"], "n": 2, "max_tokens": 9, "stream": True}
        frames = http.post("/v1/completions", json=body).text.strip().split("\n\n")
    assert json.loads(frames[-1][6:])["error"]["code"] == "sequence_fault"
    assert not any("[DONE]" in frame for frame in frames)
    wait_for(lambda: not server.engine.running)


def test_many_leave_at_random(server: Any) -> None:
    """D16, O11: nothing of abandoned requests remains."""
    rng = random.Random(1)
    server.engine.delay_s = 0.001
    open_connections: list[socket.socket] = []
    for _ in range(60):
        open_connections.append(start(server, stream=rng.random() < 0.5, max_tokens=500))
        if rng.random() < 0.7:
            open_connections.pop(rng.randrange(len(open_connections))).close()
    for connection in open_connections:
        with contextlib.suppress(OSError):
            connection.close()
    wait_for(lambda: not server.engine.running and not server.state.live and not server.llm._streams)
