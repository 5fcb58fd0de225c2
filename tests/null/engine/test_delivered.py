"""Who has seen output hears at once that the engine is lost, also of a request on trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.clock import VirtualClock
from quire.core.commands import Trial
from quire.core.errors import EngineLost, QuireError
from quire.engine.recovery import Recovery


@pytest.mark.parametrize("trial", [None, Trial(10, (0, -1, 3))])
def test_readers_of_output_are_told_at_once(trial: Trial | None) -> None:
    async def send(_: Any) -> None:
        pytest.fail("nothing runs before there is another engine")

    told: list[tuple[str, type[QuireError]]] = []
    recovery = Recovery(VirtualClock(), send, lambda stream, error: told.append((stream.name, type(error))))
    streams: list[Any] = [SimpleNamespace(name=str(one), is_delivered=one, trial=trial) for one in (True, False)]
    recovery.fail_delivered(streams)
    assert told == [("True", EngineLost)]
