"""A client's end of the socket, beside engines that are sockets alone."""

from __future__ import annotations

import asyncio
import pathlib
import time

import pytest
import zmq

from quire.core.commands import Command
from quire.core.errors import EngineLost
from quire.core.events import EngineReady, Event
from quire.engine.link import EngineLink
from quire.engine.router import ClientRouter
from quire.engine.wire import encode


async def answer(engine: zmq.Socket[bytes], number: int) -> None:
    """Tell the client that says Hello that this engine is ready."""
    while not engine.poll(0):
        await asyncio.sleep(0.001)
    identity, _ = engine.recv_multipart()
    engine.send_multipart([identity, encode(EngineReady(2048, 16, 16, 100, "null", max_num_seqs=4, engine=number))])


def ignore(_event: Event) -> list[Command]:
    return []


async def test_an_engine_that_is_gone_before_its_greeting_is_read(tmp_path: pathlib.Path) -> None:
    """Another process's request has killed it. Both news are there when this process runs again: it must not take the
    next engine, to which the socket connects by itself, for the one that has greeted it."""
    link = EngineLink(f"ipc://{tmp_path / 'engine'}")
    engine = ClientRouter.bind(link._address)
    greeting = answering = asyncio.create_task(link.wait_ready())
    try:
        await answer(engine, 0)
        engine.close()
        time.sleep(0.3)  # this process is held up
        engine = ClientRouter.bind(link._address)
        answering = asyncio.create_task(answer(engine, 1))
        ready = await asyncio.wait_for(greeting, 10)
        if ready.engine == 0:  # it may have heard of the end first
            with pytest.raises(EngineLost):
                await asyncio.wait_for(link.receive_all(lambda _outputs: [], ignore), 10)
            with pytest.raises(EngineLost, match="is being started again"):
                await link.send()
            ready = await asyncio.wait_for(link.wait_ready(), 10)
        assert ready.engine == 1 and not engine.poll(0)
    finally:
        for task in (greeting, answering):
            task.cancel()
        await asyncio.gather(greeting, answering, return_exceptions=True)
        link.close()
        engine.close(linger=0)
