"""One live `quire serve` on the bundled model for all conformance tests, and a canary after each module.

Run by `make conformance` in an environment of its own, which has clients and no torch; the server runs in Quire's.
Invariant: after each module the server is healthy, idle, and answers a greedy request with the same bytes.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
"""litellm asks the network for prices otherwise."""
CANARY = {"model": "demo", "prompt": "def read_file(path):", "max_tokens": 24, "temperature": 0}
FLAGS = [
    *("--served-model-name", "demo", "--num-threads", "1", "--num-gpu-blocks-override", "600"),
    *("--max-model-len", "1024", "--max-prompts", "8", "--request-timeout", "60"),
]


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only `-c tests/conformance/pytest.ini` collects here: `make test` has none of these clients."""
    return None if config.inipath == HERE / "pytest.ini" else True


def pytest_addoption(parser: pytest.Parser) -> None:
    default = os.environ.get("QUIRE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    parser.addoption("--server-python", default=default, help="the Python that runs `quire serve`")
    parser.addoption("--openai-schema", default=os.environ.get("OPENAI_SCHEMA", ""), help="OpenAI's OpenAPI document")
    parser.addoption("--examples", type=int, default=15, help="random examples an operation, schema and mode")


class Server:
    """One `quire serve`, asked with nothing but the standard library."""

    def __init__(self, python: str, data_dir: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.log = log
        command = [python, "-m", "quire", "serve", "--port", str(port), "--data-dir", str(data_dir), *FLAGS]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def wait_ready(self, limit_s: float = 120) -> None:
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.ask("/health")
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not get ready")

    def ask(self, path: str, body: Any = None) -> Any:
        """JSON of a GET, or of a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def canary(self) -> str:
        return str(self.ask("/v1/completions", CANARY)["choices"][0]["text"])

    def wait_idle(self, limit_s: float = 5) -> None:
        deadline_s = time.monotonic() + limit_s
        while (load := self.ask("/v1/load"))["num_requests_running"] or load["num_requests_waiting"]:
            assert time.monotonic() < deadline_s, f"requests were left behind: {load}"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    python = request.config.getoption("--server-python")
    folder = tmp_path_factory.mktemp("server")
    found = Server(python, folder / "data", folder / "log")
    try:
        found.wait_ready()
        yield found
        assert found.stop() == 0, found.log.read_text()
        log = found.log.read_text()
        assert "Traceback" not in log, log
    finally:
        found.process.kill()
        found.process.wait(10)


@pytest.fixture(scope="session")
def golden(server: Server) -> str:
    """What the canary says on a fresh server."""
    text = server.canary()
    assert text
    return text


@pytest.fixture(scope="module", autouse=True)
def canary(server: Server, golden: str) -> Iterator[None]:
    yield
    server.wait_idle()
    assert server.ask("/health") == {"status": "ok"}
    assert server.canary() == golden, "the canary has changed"


TALLY: collections.Counter[tuple[str, int]] = collections.Counter()
"""(what was asked, status) → how often, for the summary."""


@pytest.fixture(scope="session")
def tally() -> collections.Counter[tuple[str, int]]:
    return TALLY


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what in sorted({what for what, _ in TALLY}):
        counts = {status: n for (other, status), n in sorted(TALLY.items()) if other == what}
        terminalreporter.write_line(f"{what}: {sum(counts.values())} requests, by status {counts}")
