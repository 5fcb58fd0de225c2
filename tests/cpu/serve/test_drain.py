"""What a server says when it ends with requests open."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, cast

import pytest

from quire.serve.config import ServerConfig
from quire.serve.server import Service


class Open:
    """A request that ends only when it is cut off."""

    def __init__(self, service: Service) -> None:
        self._live = cast(Any, service.state.live)
        self._live.add(self)

    def stop(self, error: object) -> None:
        self._live.discard(self)


@pytest.fixture
def service() -> Any:
    async def never() -> Any:
        raise AssertionError("nothing is loaded here")

    with socket.socket() as listener:
        yield lambda limit_s: Service(ServerConfig(shutdown_timeout=limit_s), listener, never)


@pytest.mark.parametrize(("n", "cut"), [(1, "1 request is cut off"), (3, "3 requests are cut off")])
async def test_requests_cut_off_are_counted(
    service: Any, n: int, cut: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = service(0.05)
    _ = [Open(ending) for _ in range(n)]
    with caplog.at_level(logging.WARNING, "quire.serve"):
        await ending._drain()
    assert not ending.state.live
    assert [record.getMessage() for record in caplog.records] == [f"0.05 s are over (--shutdown-timeout): {cut}"]
    within = "for at most 0.05 s (--shutdown-timeout)"
    requests = cut.rsplit(" ", 3)[0]
    begun, ended = capsys.readouterr().out.splitlines()
    assert f"Finishing {requests} {within}; a second Ctrl-C" in begun
    assert ended == f"Quire shuts down: {requests} cut off."


async def test_a_closing_line_follows_what_was_finished(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ending = service(300)
    request = Open(ending)
    draining = asyncio.create_task(ending._drain())
    await asyncio.sleep(0)
    request.stop(None)
    await asyncio.wait_for(draining, 60)
    begun, ended = capsys.readouterr().out.splitlines()
    assert begun.startswith("Finishing 1 request ") and ended == "Quire shuts down: no request is open any more."


async def test_a_second_ctrl_c_and_an_idle_server_say_nothing_of_it(
    service: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    forced = service(300)
    Open(forced)
    forced.force()
    await asyncio.wait_for(forced._drain(), 60)
    await service(300)._drain()
    *_, cut, idle = capsys.readouterr().out.splitlines()
    assert (cut, idle) == ("Quire shuts down: 1 request cut off.", "Quire shuts down: no request is open.")
    assert not caplog.records and not forced.state.live
