"""Hostile cases that no other file covers, each followed by a canary that must bring the same bytes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import read_all
from serve_fakes import reply_to

from quire.engine.logs import MAX_REPEATS, MAX_TRACEBACK_CHARS, OneLineFormatter, RateLimitFilter
from quire.serve.app import _routes
from quire.serve.config import ServerConfig
from quire.serve.ops.metrics import LAG_BUCKETS
from quire.serve.server import warn_if_open

PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}


def canary(server: Any) -> None:
    answer = httpx.post(server.base + PATH, json=BODY, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]
    assert httpx.get(server.base + "/health").status_code == 200
    deadline_s = time.monotonic() + 60
    while server.engine.running and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not server.engine.running and not server.state.live


@pytest.fixture
def watched(server: Any) -> Iterator[Any]:
    """The shared server; the canary comes after the case."""
    yield server
    server.engine.delay_s, server.engine.held = 0.0, False
    canary(server)


def held_long(server: Any) -> int:
    """How often the event loop's own work has held it for more than 50 ms."""
    buckets, _, _ = server.state.metrics.loop.counts()["loop"]
    return sum(buckets[LAG_BUCKETS.index(0.05) + 1 :])


def raw(server: Any, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return f"POST {PATH} HTTP/1.1\r\n{fields}\r\n".encode() + data


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False), ({"host": "0.0.0.0"}, True), ({"host": "::"}, True), ({"host": "localhost"}, False),
        ({"host": "0.0.0.0", "api_key": "secret-key"}, False), ({"host": "::", "api_key_file": "keys.json"}, False),
    ],
)  # fmt: skip
def test_c07_a_public_address_without_a_key(
    options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(**options)
    assert config.host == options.get("host", "127.0.0.1"), "by default only this machine is served"
    warn_if_open(config, config.host)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.startswith(f"ANYONE WHO REACHES {config.host} CAN USE") for line in lines] == [True] * warns


def test_h11_many_slow_heads(make_server: Any) -> None:
    server = make_server(header_timeout=1.0)
    slow = [server.connect() for _ in range(300)]
    try:
        for connection in slow:
            connection.sendall(b"GET /version HTT")
        canary(server)
        for connection in slow:
            connection.settimeout(60)
            assert b" 408 " in read_all(connection)
    finally:
        for connection in slow:
            connection.close()
    canary(server)


def test_o03_two_thousand_connections_at_once(watched: Any) -> None:
    connections = []
    for _ in range(2000):
        connection = socket.socket()
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect(("127.0.0.1", watched.port))
        connections.append(connection)
    try:
        canary(watched)
        for connection in connections:
            connection.settimeout(60)
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert all(read_all(connection).startswith(b"HTTP/1.1 200 ") for connection in connections)
    finally:
        for connection in connections:
            connection.close()


def test_d07_a_half_closed_connection_counts_as_left(watched: Any) -> None:
    watched.engine.delay_s = 0.01
    with watched.connect() as connection:
        connection.sendall(raw(watched, {**BODY, "max_tokens": 2000, "stream": True}))
        connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        began_s = time.monotonic()
        read_all(connection)
        assert time.monotonic() - began_s < 10


def test_d08_resets_while_writing(watched: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        connection = watched.connect()
        connection.sendall(raw(watched, {**BODY, "max_tokens": 2000, "stream": True}))
        connection.recv(200)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    time.sleep(0.2)
    assert "Traceback" not in caplog.text and not caplog.records


@pytest.mark.parametrize("case", ["good", "streamed", "refused", "failed", "left", "left in a stream", "full"])
def test_o08_a_request_leaves_nothing_for_the_collector(make_server: Any, case: str) -> None:
    """Cycles of requests that lived long are found late: under overload they were most of the memory."""
    server = make_server(engine_options={"max_num_waiting": 1})
    fields = {"refused": {"temperature": -1}, "streamed": {"stream": True}, "left in a stream": {"stream": True}}
    body = {**BODY, "max_tokens": 4, **fields.get(case, {})}
    server.engine.fault = lambda request: case == "failed"
    if case == "full":
        server.llm.ready.max_num_seqs, server.engine.delay_s, body["prompt"] = 1, 0.02, [[5]] * 3
    if case.startswith("left"):
        server.engine.delay_s, body["max_tokens"] = 0.02, 1000
    status = {"refused": b" 400 ", "failed": b" 500 ", "full": b" 429 "}.get(case, b" 200 ")

    def ask() -> None:
        with server.connect() as connection:
            connection.sendall(raw(server, body).replace(b"host: localhost", b"host: localhost\r\nconnection: close"))
            if case == "left":
                time.sleep(0.03)
            elif case == "left in a stream":
                connection.recv(50)
            else:
                assert status in read_all(connection)[:20]

    ask()
    gc.disable()
    try:
        gc.collect()
        for _ in range(20):
            ask()
        time.sleep(0.2)
        assert gc.collect() < 40, "a request leaves cycles"
    finally:
        gc.enable()


def test_d16_o11_retries_of_a_client_that_gave_up_do_not_add_load(watched: Any) -> None:
    watched.engine.held = True
    for _ in range(20):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(watched.base + PATH, json=BODY, timeout=0.15)
    deadline_s = time.monotonic() + 60
    while len(watched.engine.running) > 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"fake","prompt":"x",' + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
        json.dumps({"model": "fake", "prompt": ["x"] * 1_000_000}).encode(),
        json.dumps({"model": "fake", "prompt": [[1]] * 200_000}).encode(),
        json.dumps({"model": "fake", "prompt": "x", "metadata": {str(i): "x" for i in range(100_000)}}).encode(),
    ],
    ids=["J05 keys", "P02 strings", "P02 lists", "J15 metadata"],
)
def test_large_bodies_of_nonsense_leave_others_alone(watched: Any, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    began_s = time.process_time()
    answer = httpx.post(watched.base + PATH, content=body, headers=headers, timeout=60)
    assert answer.status_code in (200, 400, 413) and time.process_time() - began_s < 5
    assert len(answer.content) < 2000


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "👩‍👩‍👧‍👦" * 8000, "e" + "\u0301" * 100_000, "\u200d" * 100_000,
             " " * 200_000, "ก" * 60_000],
    ids=["letters", "emoji", "marks", "joiners", "blanks", "thai"],
)  # fmt: skip
def test_p06_texts_that_are_hard_to_tokenize(watched: Any, text: str) -> None:
    began_s = time.process_time()
    answer = httpx.post(watched.base + PATH, json={**BODY, "prompt": text}, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert time.process_time() - began_s < 5


def test_x01_labels_are_from_closed_sets(watched: Any) -> None:
    with httpx.Client(base_url=watched.base) as http:
        for i in range(50):
            http.request("GET", f"/v1/models/m{i}", headers={"x-request-id": f"r{i}"})
            http.request("POST", f"/path{i}/{'x' * i}")
            http.post(PATH, json={**BODY, "user": f"u{i}", "model": f"m{i}"})
        text = http.get("/metrics").text
    labels = set(re.findall(r'handler="([^"]*)",method="([^"]*)"', text))
    assert ("/v1/models/{model:path}", "GET") in labels and ("other", "POST") in labels
    patterns = {route.path for route in _routes(watched.state)}
    assert not re.search(r"path\d|[/\"][mur]\d", text) and {handler for handler, _ in labels} <= patterns | {"other"}


def test_x04_secrets_and_prompts_are_in_no_log(make_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(api_key="s3cret-key", access_log=True)
    with caplog.at_level(logging.DEBUG, logger="quire"), server.client() as http:
        assert http.post(PATH, json={**BODY, "prompt": "my private words"}).status_code == 200
        assert http.post(PATH, json={**BODY, "prompt": "my private words", "temperature": -5}).status_code == 400
    assert "POST /v1/completions 200" in caplog.text
    assert "s3cret" not in caplog.text and "private" not in caplog.text


def test_x06_equal_lines_are_counted_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    rate_limit, now_s = RateLimitFilter(), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    record = logging.LogRecord("quire.serve", logging.ERROR, "file.py", 7, "it failed: %s", ("why",), None)
    assert sum(rate_limit.filter(record) for _ in range(100_000)) == MAX_REPEATS
    assert rate_limit.filter(logging.LogRecord("quire.serve", logging.ERROR, "file.py", 8, "other", (), None))
    now_s = 60.0
    assert rate_limit.filter(record) and "99980 more like it" in record.getMessage()


def test_x06_lines_of_others_stay_one_line() -> None:
    record = logging.LogRecord(
        "quire", logging.INFO, "f", 1, "path %s", ("/a\r\nERROR fake\x1b[2J" + "x" * 9000,), None
    )
    line = OneLineFormatter("%(levelname)s %(message)s").format(record)
    assert line.isprintable() and "\n" not in line and len(line) <= 4000


def test_x06_tracebacks_are_bounded_and_forge_no_line() -> None:
    """The message of an exception may be of a client's making, and a recursion fills megabytes."""

    def fall(depth: int) -> None:
        if not depth:
            raise ValueError("no\r\n2026-01-01 ERROR quire: forged\x1b[2J\u2028x" + "y" * 50_000)
        (lambda: fall(depth - 1))()

    try:
        fall(300)
    except ValueError:
        record = logging.LogRecord("quire", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    first, *others = OneLineFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "ERROR it failed" and "Traceback" in others[0] and "yyy" in others[-1]
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert sum(map(len, others)) < 2 * MAX_TRACEBACK_CHARS


def test_x07_a_scrape_with_many_streams(make_server: Any) -> None:
    server = make_server(engine_options={"max_num_waiting": 4000})
    server.engine.held = True
    connections = [server.connect() for _ in range(800)]
    try:
        for connection in connections:
            connection.sendall(raw(server, {**BODY, "stream": True}))
        deadline_s = time.monotonic() + 120
        while len(server.engine.submitted) < len(connections) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert len(server.engine.submitted) == len(connections)
        n_held = [held_long(server)]
        with httpx.Client(base_url=server.base) as http:
            for _ in range(9):
                assert http.get("/metrics").status_code == 200
                n_held.append(held_long(server))
        # Work that takes so long takes it each time; a busy machine does not stop this process at each of nine.
        assert any(before == after for before, after in itertools.pairwise(n_held)), "a scrape held the event loop"
    finally:
        for connection in connections:
            connection.close()
    server.engine.held = False
    canary(server)
