"""Nobody reads what a server writes: it goes on, whoever writes what, and ends in time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from light_server import light, wait_for

from quire.engine.stdio import QueuedStream

N_REQUESTS = 3000
"""Each writes a line of some 80 bytes; a pipe holds 65,536."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for fd in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_an_outlet_takes_everything_and_counts_what_it_drops(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    queued = QueuedStream(writing, "stderr", max_bytes=200_000)
    lines = [b"%06d %s\n" % (number, b"x" * 90) for number in range(10_000)]
    for line in lines:
        assert queued.write(line) == len(line)
    assert not queued.drain(0.1), "nobody reads"
    got = bytearray()

    def read() -> None:
        while data := os.read(reading, 65536):
            got.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    assert queued.drain(60)
    queued.write(b"last\n")
    assert queued.drain(60)
    os.close(writing)
    reader.join(60)
    *kept, note, last = bytes(got).splitlines(keepends=True)
    assert kept == lines[: len(kept)] and len(kept) > 2000
    assert note == b"quire: %d lines were dropped here: stderr was not read\n" % (10_000 - len(kept))
    assert last == b"last\n"


def test_an_outlet_on_a_file_that_others_have_made_non_blocking(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    queued = QueuedStream(writing, "stderr")
    data = b"x" * 79 + b"\n"
    for _ in range(5000):
        queued.write(data)
    got = b""
    while len(got) < 5000 * len(data):
        got += os.read(reading, 65536)
    assert got == data * 5000 and queued.drain(10)


def test_an_outlet_on_a_closed_pipe_and_on_a_full_disk(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    for fd in (pipe[1], os.open("/dev/full", os.O_WRONLY)):
        queued = QueuedStream(fd, "stderr")
        for _ in range(1000):
            queued.write(b"x" * 100)
        assert queued.drain(10)


@pytest.mark.parametrize("flags", [[], ["--api-processes", "2"]])
def test_an_unread_pipe_stops_nobody(tmp_path: pathlib.Path, pipe: tuple[int, int], flags: list[str]) -> None:
    """Access lines of thousands of requests, stacks of every process, warnings of the engine: all into the same full
    pipe, which is stdout too. The canary is every single answer."""
    reading, writing = pipe
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    with light(tmp_path, "--access-log", *flags, stdout=writing, stderr=writing) as server:
        server.wait_ready()
        golden = server.canary()
        with httpx.Client(base_url=server.base, timeout=60) as http:
            for number in range(N_REQUESTS):
                assert http.get("/v1/models").status_code == 200
                if number % 500 == 0:
                    for process in server.processes():
                        process.send_signal(signal.SIGUSR1)
                    assert server.canary() == golden
        [engine] = server.children("faulty_engine")
        engine.kill()
        wait_for(lambda: [one.pid for one in server.children("faulty_engine")] not in ([], [engine.pid]))
        server.wait_ready()
        assert server.canary() == golden
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    os.close(writing)
    with open(reading, "rb", closefd=False) as rest:
        assert rest.read().lstrip(b".") == b"", "nothing was written behind the full pipe"


def test_what_was_said_last_is_written_at_the_end(tmp_path: pathlib.Path) -> None:
    """Lines in the queue when the process ends, by return or by an exception, are not lost."""
    code = "from quire.engine import logs; import logging, sys; logs.set_up(); log = logging.getLogger('quire.x')\n"
    code += "for i in range(3000): log.error('line %d of %s', i, 'x' * 60) if i < 20 else print('line', i)\n"
    for end, status in (("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)):
        done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert done.stdout.splitlines()[-1] == "line 2999" and "line 19 of" in done.stderr
        assert ("ZeroDivisionError" in done.stderr) == (status == 1)


def test_the_end_is_not_delayed_by_an_unread_pipe(pipe: tuple[int, int]) -> None:
    code = "from quire.engine import logs; logs.set_up()\nfor i in range(3000): print('x' * 100)"
    began_s = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], stdout=pipe[1], stderr=pipe[1], timeout=60).returncode == 0
    assert time.monotonic() - began_s < 30
