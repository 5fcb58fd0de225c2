"""Several API processes on one port over one engine: deaths, drains and figures of the whole."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from test_serve_live import MODEL, ROOT, Process, free_port, start

pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the bundled model")

__all__ = ["start"]

LONG = {"model": "demo", "prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
CANARY = {"model": "demo", "prompt": "def add", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
N_PROCESSES = 2


class SeveralProcesses(Process):
    def __init__(self, *flags: str) -> None:
        super().__init__("--api-processes", str(N_PROCESSES), *flags)

    def children(self, part: str) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children()
        return [child for child in found if any(part in word for word in child.cmdline())]

    def api_processes(self) -> list[psutil.Process]:
        return self.children("quire.serve.api_process")

    def wait_all_ready(self) -> None:
        """Every API process answers: so many connections in a row that none can have been left out."""
        for _ in range(16):
            self.wait_ready()

    def canary(self) -> str:
        answer = httpx.post(self.base + "/v1/completions", json=CANARY, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    def serving(self, connection_port: int) -> psutil.Process:
        """The API process that has accepted the connection from this local port."""
        for process in self.api_processes():
            for connection in process.net_connections("tcp"):
                if connection.raddr and connection.raddr.port == connection_port:
                    return process
        raise AssertionError("no API process has the connection")


@pytest.fixture(scope="module")
def server() -> Iterator[SeveralProcesses]:
    process = SeveralProcesses("--shutdown-timeout", "300")
    process.wait_all_ready()
    yield process
    process.stop()


@contextlib.contextmanager
def streaming(process: SeveralProcesses) -> Iterator[tuple[psutil.Process, Iterator[str]]]:
    """A stream that runs, and the API process that serves it."""
    with httpx.Client(timeout=60) as http, http.stream("POST", process.base + "/v1/completions", json=LONG) as answer:
        lines = answer.iter_lines()
        next(lines)
        local = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        yield process.serving(local), lines


def running(process: SeveralProcesses) -> int:
    """Asked again where the connection was in the queue of a process that has just died."""
    for _ in range(20):
        with contextlib.suppress(httpx.TransportError):
            return int(httpx.get(process.base + "/v1/engine").json()["stats"]["n_running"])
    raise AssertionError("no process answers")


def counted(process: SeveralProcesses) -> int:
    text = httpx.get(process.base + "/metrics").text
    return sum(int(float(n)) for n in re.findall(r'quire:http_requests_total{handler="/v1/comp[^}]*} (\S+)', text))


def test_a_killed_process_ends_only_its_own_requests(server: SeveralProcesses) -> None:
    golden = server.canary()
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streaming(server)) for _ in range(6)]
        victim = streams[0][0]
        assert {process.pid for process, _ in streams} <= {process.pid for process in server.api_processes()}
        others = [lines for process, lines in streams if process.pid != victim.pid]
        victim.kill()
        deadline_s = time.monotonic() + 60
        while running(server) > len(others) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert running(server) <= len(others), "the engine has ended the requests of the dead process"
        for lines in others:
            assert "data: [DONE]" in list(lines)
    deadline_s = time.monotonic() + 60
    while len(server.api_processes()) < N_PROCESSES and time.monotonic() < deadline_s:
        time.sleep(0.1)
    server.wait_all_ready()
    assert [server.canary() for _ in range(4)] == [golden] * 4


def test_counters_are_of_all_and_never_go_back(server: SeveralProcesses) -> None:
    time.sleep(0.5)  # what each API process counted before is told to the others twice a second
    before, last = counted(server), 0
    for _ in range(12):
        server.canary()
        now = counted(server)
        assert now >= last
        last = now
    time.sleep(0.5)
    assert counted(server) == before + 12


def test_a_killed_engine_is_shared_again(server: SeveralProcesses) -> None:
    golden = server.canary()
    [engine] = server.children("quire.engine.process")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.canary) for _ in range(4)]
        engine.kill()
        for one in waiting:
            with contextlib.suppress(KeyError):  # an error body: it came while there was no engine
                assert one.result() == golden
    server.wait_all_ready()
    assert [server.canary() for _ in range(4)] == [golden] * 4
    assert server.children("quire.engine.process")[0].pid != engine.pid


def test_a_taken_port_is_said_at_once(server: SeveralProcesses, start: Callable[..., Process]) -> None:
    for flags in ([], ["--api-processes", "2"]):
        process = start(*flags, port=server.port)
        assert process.wait(60) == 2
        assert "in use" in process.output()


def test_sigterm_lets_streams_of_all_processes_finish(server: SeveralProcesses) -> None:
    """The last test of the shared server: it ends it."""
    children = psutil.Process(server.process.pid).children()
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streaming(server)) for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        for _, lines in streams:
            assert "data: [DONE]" in list(lines)
    assert server.wait(60) == 0
    assert not any(child.is_running() for child in children)
    assert "Traceback" not in server.output()


@pytest.mark.parametrize("flags", [[], ["--api-processes", "2"]])
def test_no_standard_output_and_a_killed_parent(flags: list[str]) -> None:
    """stdout closed and stderr on a full disk: it serves; killed outright, it leaves nobody behind."""
    shape = SeveralProcesses.__new__(SeveralProcesses)
    shape.port = free_port()
    command = [sys.executable, "-m", "quire", "serve", "--device", "null", "--port", str(shape.port), *flags]
    shape.base = f"http://127.0.0.1:{shape.port}"
    with open("/dev/full", "w") as full:
        shape.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" >&-', "sh", *command], cwd=ROOT, stderr=full, start_new_session=True, text=True
        )
    try:
        shape.wait_ready()
        for _ in range(3):
            answer: dict[str, Any] = httpx.post(shape.base + "/v1/completions", json={**CANARY, "max_tokens": 3}).json()
            assert answer["usage"]["completion_tokens"] == 3, json.dumps(answer)
        children = psutil.Process(shape.process.pid).children(recursive=True)
        assert len(children) == (3 if flags else 1)
    finally:
        shape.process.kill()
        shape.process.wait()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)
