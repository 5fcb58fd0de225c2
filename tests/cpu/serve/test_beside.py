"""Tasks that run beside a request or the server: their failures are never silent."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from quire.serve.config import ServerConfig
from quire.serve.http.delivery import ExchangeTask
from quire.serve.http.exchange import Exchange
from quire.serve.ops.beside import keep_going


async def test_work_that_fails_is_said_and_begun_again(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("quire.serve.ops.beside.RESTART_S", 0.001)
    n_runs = 0

    async def work() -> None:
        nonlocal n_runs
        n_runs += 1
        if n_runs < 3:
            raise RuntimeError("a bug")

    with caplog.at_level(logging.ERROR):
        await keep_going(work)
    assert n_runs == 3 and caplog.text.count("ended unexpectedly") == 2 and "a bug" in caplog.text


async def test_work_that_is_cancelled_stays_so() -> None:
    task = asyncio.create_task(keep_going(asyncio.Event().wait))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_does_not_go_on_unwatched() -> None:
    """When looking after the connection fails the request does, and does not wait for ever."""

    async def receive() -> Any:
        raise RuntimeError("a bug")

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "headers": []}
    exchange_task = ExchangeTask(Exchange(scope, receive, send), ServerConfig())
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(exchange_task.run(asyncio.Event().wait()), 30)
