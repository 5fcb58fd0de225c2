"""Live servers over the fake engine, one shared by many tests and others made to order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from live_server import LiveServer

from quire.core.failure import Code, Failure
from quire.serve.config import ServerConfig


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--batch-examples", default=None, help="examples of the batches' state machine (default 200)")


@pytest.fixture
def make_server() -> Iterator[Callable[..., LiveServer]]:
    """Start servers with own options; all are stopped at the end."""
    servers: list[LiveServer] = []

    def make(*, loaded: bool = True, engine_options: dict[str, Any] | None = None, **options: Any) -> LiveServer:
        config = ServerConfig(port=0, **options)
        config.verify()
        servers.append(LiveServer(config, loaded=loaded, **(engine_options or {})).start())
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = ServerConfig(port=0, data_dir=str(tmp_path_factory.mktemp("data")))
    config.verify()
    server = LiveServer(config).start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """One server for many tests; its fake engine is set back after each."""
    yield shared_server
    engine = shared_server.engine
    engine.delay_s, engine.tokens_a_step, engine.held, engine.stalled, engine.text = 0.0, 1, False, False, None
    engine.fault, engine.cached_tokens = (lambda request: False), 0
    engine.failure_of_faults = Failure(Code.NON_FINITE_LOGITS, "at 0x7f00")
    assert shared_server.call(lambda: wait_idle(shared_server)) is not None


def wait_idle(server: LiveServer) -> bool:
    return not server.engine.running
