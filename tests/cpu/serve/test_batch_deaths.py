"""Processes that die of a line, are killed, or stop in order, while batches run in them."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from faulty_server import ENGINE_POISON, POISON
from test_http_batches import line, rows, start
from test_serve_live import free_port

HERE = Path(__file__).parent
ENDS = ("completed", "failed", "cancelled", "expired")


class Server:
    """A server that is started again whenever it has ended, as a supervisor would."""

    def __init__(self, folder: Path, *, pause_s: float = 0.05, delay_s: float = 0.0) -> None:
        self.folder = folder
        self.port = free_port()
        self._words = [str(pause_s), str(delay_s)]
        self.codes: list[int] = []
        """How it has ended so far."""
        self.logs: list[Path] = []
        self.process: subprocess.Popen[bytes]
        # Made once: a client reads all certificates of the system.
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60
        )
        self.begin()

    def begin(self) -> None:
        self.logs.append(self.folder.parent / f"log-{self.port}-{len(self.logs)}")
        command = [sys.executable, str(HERE / "faulty_server.py"), str(self.port), str(self.folder), *self._words]
        with self.logs[-1].open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)

    def keep(self) -> None:
        """Start it again if it has ended."""
        code = self.process.poll()
        if code is not None:
            self.codes.append(code)
            self.begin()

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def client(self) -> openai.OpenAI:
        return self._client


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(**options: Any) -> Server:
        made.append(Server(tmp_path / "data", **options))
        return made[-1]

    yield make
    for server in made:
        server.process.kill()
        server.process.wait(60)


def until(look: Callable[[], Any], *servers: Server, limit_s: float = 120) -> Any:
    """What `look` finds, once it is true, while the servers are started again."""
    end_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(openai.APIError, httpx.HTTPError):
            if found := look():
                return found
        assert time.monotonic() < end_s, [log.read_text()[-2000:] for server in servers for log in server.logs]
        for server in servers:
            server.keep()
        time.sleep(0.05)


def ended(batch_id: str, *servers: Server) -> Any:
    def look() -> Any:
        batch = servers[0].client().batches.retrieve(batch_id)
        return batch if batch.status in ENDS else None

    return until(look, *servers)


def marks(server: Server) -> list[int]:
    """States of lines that have no output."""
    with contextlib.closing(sqlite3.connect(server.folder / "quire.sqlite3")) as database:
        return [row[0] for row in database.execute("select state from lines order by batch_id, line")]


def begin(server: Server, names: list[str]) -> str:
    content = b"".join(line(name, {"model": "fake", "prompt": name, "max_tokens": 4}) for name in names)
    return str(until(lambda: start(server.client(), content), server).id)


def check_canary(server: Server) -> None:
    answer = server.client().completions.create(model="fake", prompt="canary", max_tokens=4)
    assert len(answer.choices[0].text) == 4


@pytest.mark.parametrize("n_servers", [1, 2])
def test_a_line_that_ends_the_process_is_convicted(serve: Callable[..., Server], n_servers: int) -> None:
    servers = [serve() for _ in range(n_servers)]
    names = [*(f"line {i}" for i in range(12)), POISON, *(f"line {i}" for i in range(12, 15))]
    batch_id = begin(servers[0], names)
    done = ended(batch_id, *servers)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (15, 1)
    row = rows(servers[0].client(), done.error_file_id)[POISON]
    assert row["response"]["status_code"] == 400 and row["error"] is None
    error = row["response"]["body"]["error"]
    assert (error["code"], error["type"]) == ("request_quarantined", "invalid_request_error")
    assert "ended 3 times" in error["message"]
    assert set(rows(servers[0].client(), done.output_file_id)) == set(names) - {POISON}
    codes = [code for server in servers for code in server.codes]
    assert codes == [-signal.SIGSEGV] * 4, "once among others, three times alone"
    check_canary(servers[0])
    again = ended(begin(servers[0], ["good"]), *servers)
    assert again.request_counts.completed == 1 and len(codes) == sum(len(server.codes) for server in servers)


def test_a_line_that_ends_the_engine_for_good_is_convicted(serve: Callable[..., Server]) -> None:
    """The server ends in order then, and is to be started again: that is no excuse for the line."""
    server = serve()
    names = [*(f"line {i}" for i in range(10)), ENGINE_POISON, "last"]
    done = ended(begin(server, names), server)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 11, 1)
    row = rows(server.client(), done.error_file_id)[ENGINE_POISON]
    assert row["response"]["body"]["error"]["code"] == "request_quarantined"
    assert server.codes == [1] * 4
    check_canary(server)


def test_an_input_that_ends_the_process_is_convicted(serve: Callable[..., Server]) -> None:
    """What a start finds when processes have died of reading an input."""
    server = serve(delay_s=0.3)
    first = begin(server, [f"line {i}" for i in range(40)])
    until(lambda: 1 in marks(server), server)
    server.end(signal.SIGKILL)
    with contextlib.closing(sqlite3.connect(server.folder / "quire.sqlite3")) as database, database:
        database.execute("update batches set status = 'validating' where id = ?", (first,))
        database.execute("delete from lines where batch_id = ?", (first,))
        columns = "(batch_id, line, offset, length, is_double, state, deaths)"
        database.execute(f"insert into lines {columns} values (?, -1, 0, 9, 0, 3, 2)", (first,))
    done = ended(first, server)
    assert done.status == "failed" and done.errors.data[0].code == "request_quarantined"
    check_canary(server)


def test_kills_from_outside_convict_nobody(serve: Callable[..., Server]) -> None:
    server = serve(delay_s=0.3)
    batch_id = begin(server, [f"line {i}" for i in range(6)])
    for _ in range(2):
        until(lambda: any(state in (1, 3) for state in marks(server)), server)
        server.end(signal.SIGKILL)
        server.keep()
    done = ended(batch_id, server)
    assert (done.status, done.request_counts.completed) == ("completed", 6)
    assert "run one at a time now" in "".join(log.read_text() for log in server.logs)
    check_canary(server)


def test_a_stop_in_order_makes_no_suspects(serve: Callable[..., Server]) -> None:
    server = serve(delay_s=0.3)
    batch_id = begin(server, [f"line {i}" for i in range(8)])
    until(lambda: 1 in marks(server), server)
    assert server.end(signal.SIGTERM) == 0
    assert set(marks(server)) == {0}
    server.keep()
    done = ended(batch_id, server)
    assert (done.status, done.request_counts.completed) == ("completed", 8)
    assert "one at a time" not in server.logs[-1].read_text()
    check_canary(server)


def test_a_second_signal_makes_no_suspects_either(serve: Callable[..., Server]) -> None:
    server = serve(delay_s=0.5)
    begin(server, [f"line {i}" for i in range(10)])
    until(lambda: 1 in marks(server), server)
    server.process.send_signal(signal.SIGINT)
    server.end(signal.SIGINT)
    assert set(marks(server)) <= {0}
