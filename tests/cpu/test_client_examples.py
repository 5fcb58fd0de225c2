"""Every client in examples/clients that needs installed packages only talks to a live server, and checks itself.

The others (LangChain, Node) need packages of their own; their requests are those of `tests/conformance`.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.served import free_port, served

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "examples" / "clients"
SHOWS = {
    "batch": "sum-29 ",
    "chat": "tokens in",
    "embeddings": "numbers each",
    "structured": "{'name': ",
    "tools": "get_weather({",
}
"""Client → what it prints whatever the model says."""
NOT_INSTALLED = {"langchain_chat"}
MAX_LINES = 70
START_S = 200


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    options = ["--port", str(free_port()), "--data-dir", str(folder / "data"), "--max-num-seqs", "8"]
    with served([sys.executable, "-m", "quire", "serve", *options], folder / "log", START_S) as server:
        yield server.base_url


@pytest.mark.parametrize("name", SHOWS)
def test_client(url: str, name: str) -> None:
    environment = {**os.environ, "QUIRE_URL": url}
    command = [sys.executable, str(CLIENTS / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert SHOWS[name] in done.stdout


@pytest.mark.parametrize("name", SHOWS)
def test_without_a_server_one_line_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, since importing the package takes a second; its retries wait for nothing."""
    monkeypatch.setenv("QUIRE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("openai._base_client.BaseClient._calculate_retry_timeout", lambda *_, **__: 0.0)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CLIENTS / f"{name}.py"))
    assert ended.value.code == "no server answers at http://127.0.0.1:9/v1: start `quire serve` first"


def test_every_client_is_tried_or_named() -> None:
    files = {path.stem for path in CLIENTS.glob("*.py")}
    assert files == SHOWS.keys() | NOT_INSTALLED


def test_clients_are_short_and_in_the_list() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    for path in (*CLIENTS.glob("*.py"), CLIENTS / "node" / "chat.mjs"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
        assert path.relative_to(ROOT / "examples").as_posix() in page, f"examples/README.md does not name {path.name}"
