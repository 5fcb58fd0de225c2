"""Clients that left, in log and metrics: 499 where no status was sent, else that status and a mark."""

from __future__ import annotations

import json
import logging
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, read_all
from serve_fakes import reply_to

from quire.core.events import EngineStats
from quire.serve.ops.metrics import Metrics

PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 30}


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def counted(server: LiveServer) -> tuple[dict[tuple[str, str, str], int], dict[str, int]]:
    """HTTP answers by route, method and status; clients lost, by route. Without those of looking."""
    text = httpx.get(server.base + "/metrics").text
    found = re.findall(r'http_requests_total{handler="(.*?)",method="(.*?)",status="(.*?)"} (\S+)', text)
    answers = {(route, method, status): int(float(n)) for route, method, status, n in found if route != "/metrics"}
    lost = re.findall(r'http_clients_lost_total{handler="(.*?)"} (\S+)', text)
    return answers, {route: int(float(n)) for route, n in lost}


def begin(server: LiveServer, **fields: Any) -> socket.socket:
    data = json.dumps({**BODY, **fields}).encode()
    connection = server.connect()
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % PATH.encode()
    connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    connection.close()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Lines of the access log."""
    caplog.set_level(logging.INFO, logger="quire.access")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "quire.access"]


def canary(server: LiveServer) -> None:
    answer = httpx.post(server.base + PATH, json=BODY, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_who_leaves_before_the_answer_is_499(make_server: Any, lines: Any, how: str) -> None:
    server = make_server(access_log=True)
    server.engine.delay_s = 0.02
    connection = begin(server, max_tokens=2000)
    wait_for(lambda: server.engine.tokens_made)
    leave(connection, how)
    wait_for(lambda: not server.state.live)
    server.engine.held = True
    connection = begin(server, stream=True)
    wait_for(lambda: server.state.live)
    leave(connection, how)
    wait_for(lambda: len(lines()) == 2)
    assert counted(server) == ({(PATH, "POST", "499"): 2}, {PATH: 2})
    assert all(re.fullmatch(rf"POST {PATH} 499 [0-9.]+ s req_\w+, client left", line) for line in lines())
    server.engine.held = False
    canary(server)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_who_leaves_a_stream_has_the_status_that_was_sent(make_server: Any, lines: Any, how: str) -> None:
    server = make_server(access_log=True)
    server.engine.delay_s = 0.02
    connection = begin(server, stream=True, max_tokens=2000)
    assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    leave(connection, how)
    wait_for(lambda: lines())
    assert counted(server) == ({(PATH, "POST", "200"): 1}, {PATH: 1})
    assert re.fullmatch(rf"POST {PATH} 200 [0-9.]+ s req_\w+, client left", lines()[0])
    canary(server)
    wait_for(lambda: len(lines()) == 2)
    assert "left" not in lines()[1]


def test_who_leaves_within_the_body_is_499(make_server: Any, lines: Any) -> None:
    server = make_server(access_log=True)
    with server.connect() as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        connection.sendall(b"content-length: 100\r\n\r\n{")
        wait_for(lambda: server._http.server_state.tasks)
    wait_for(lambda: lines())
    assert counted(server) == ({("/tokenize", "POST", "499"): 1}, {"/tokenize": 1})
    canary(server)


def test_who_does_not_read_is_lost(make_server: Any, lines: Any) -> None:
    server = make_server(access_log=True, write_timeout=0.3)
    server.engine.text, server.engine.tokens_a_step = "blah " * 800, 50
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = {"model": "fake", "prompt": ["x"] * 8, "max_tokens": 4000, "stream": True, "logprobs": 20, "n": 4}
        data = json.dumps(body).encode()
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % PATH.encode()
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        wait_for(lambda: lines())
    assert counted(server) == ({(PATH, "POST", "200"): 1}, {PATH: 1})


def test_what_is_refused_in_place_of_an_answer_has_its_own_status(make_server: Any, lines: Any) -> None:
    """A body that is no HTTP: the client got a 400, and did not leave first. Heads that are none are counted too."""
    server = make_server(access_log=True)
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    reply = server.exchange(head + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    wait_for(lambda: lines())
    assert " 400 " in lines()[0] and "left" not in lines()[0]
    server.exchange(b"\x00\r\n\r\n")
    server.exchange(b"GET /" + b"a" * 100_000)
    answers, lost = counted(server)
    other = {("other", "other", "400"): 1, ("other", "other", "431"): 1}
    assert answers == {("/tokenize", "POST", "400"): 1, **other} and not lost
    canary(server)


async def test_several_processes_count_together(tmp_path: Path) -> None:
    first, second = Metrics(), Metrics()
    first.share(str(tmp_path), 0)
    second.share(str(tmp_path), 1)
    for metrics, n in ((first, 2), (second, 3)):
        for _ in range(n):
            metrics.count_lost_client(PATH)
        await metrics.publish()
    again = Metrics()
    again.share(str(tmp_path), 1)
    for metrics in (first, again):
        assert b'http_clients_lost_total{handler="/v1/completions"} 5.0' in await metrics.text(EngineStats())
