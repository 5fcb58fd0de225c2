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
from collections.abc import Iterator, Sequence
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
ROOMY_FLAGS = [
    *("--served-model-name", "demo", "--num-threads", "1", "--num-gpu-blocks-override", "600"),
    *("--max-model-len", "3072", "--hf-overrides", '{"max_position_embeddings": 3072}', "--request-timeout", "60"),
    *("--override-generation-config", '{"temperature": 0}'),
]
"""For clients that bring a long prompt of their own and set no temperature."""
GROUPS = ROOT / ".venv-conformance" / "groups"
NPM = ROOT / ".venv-conformance" / "npm"
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True", "LITELLM_LOCAL_POLICY_TEMPLATES": "true",
    "LITELLM_LOCAL_BLOG_POSTS": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OTEL_SDK_DISABLED": "true", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1",
    "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1", "PROMPTFOO_DISABLE_SHARING": "1", "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false", "NO_COLOR": "1", "TERM": "dumb", "NO_PROXY": "127.0.0.1",
}  # fmt: skip
"""No client tells anybody that it is used, nor asks whether there is a newer one."""


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

    def __init__(self, python: str, data_dir: Path, log: Path, flags: Sequence[str] = FLAGS) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.log = log
        command = [python, "-m", "quire", "serve", "--port", str(port), "--data-dir", str(data_dir), *flags]
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
def roomy_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second server, with `ROOMY_FLAGS`."""
    folder = tmp_path_factory.mktemp("roomy")
    python = request.config.getoption("--server-python")
    found = Server(python, folder / "data", folder / "log", ROOMY_FLAGS)
    try:
        found.wait_ready()
        yield found
        assert found.stop() == 0, found.log.read_text()
        assert "Traceback" not in found.log.read_text(), found.log.read_text()
    finally:
        found.process.kill()
        found.process.wait(10)


def installed(place: Path) -> Path:
    """The environment of a group; the test is skipped with the reason where `prepare` could not make it."""
    skipped = place.with_name(place.name + ".skipped")
    if skipped.exists():
        pytest.skip(f"{place.name}: {skipped.read_text().strip()}")
    if not place.is_dir():
        pytest.skip(f"{place.name}: not installed; run tests/conformance/prepare")
    return place


class Shell:
    """Runs clients as programs of their own, with a home that is thrown away."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, **QUIET, "HOME": str(home)}

    def run(self, command: Sequence[object], limit_s: float = 200, cwd: Path | None = None, **env: object) -> str:
        """What it writes to stdout; an AssertionError with all of it if it fails."""
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd or self.home, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=limit_s, env={**self.environment, **{name: str(value) for name, value in env.items()}},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def script(self, group: str, name: str, *arguments: object) -> Any:
        """The results of one of `scripts/`, run in a group's environment."""
        python = installed(GROUPS / group) / "bin" / "python"
        return json.loads(self.run([python, HERE / "scripts" / name, *arguments]).strip().splitlines()[-1])


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


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
