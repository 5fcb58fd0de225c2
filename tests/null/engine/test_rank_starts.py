"""What is said of a start that takes long: which ranks it waits for, and what the kernel knows of them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.ranks.ring import IDLE, READY, STARTING, Standing
from quire.engine.ranks.starting import SAY_S, StartWatch


class Rank:
    """One that stands somewhere."""

    def __init__(self, number: int, state: int, silent_s: float = 0.1, words: str = "") -> None:
        self.name, self._words = f"rank {number} (process {number}0)", words
        self._standing = Standing(state, silent_s, 0, 0)

    def standing(self) -> Standing:
        return self._standing

    def state_words(self) -> str:
        return self._words


def said(caplog: pytest.LogCaptureFixture, *ranks: Any) -> list[str]:
    """Of a start that has gone on for some time, seen three times."""
    watch = StartWatch(100.0)
    for now_s in (100.1, 101.0 + SAY_S, 102.0 + SAY_S):
        watch.look(ranks, now_s)
    return caplog.messages


def test_who_has_not_begun_to_load_is_named_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    found = said(caplog, Rank(1, STARTING, words="stopped by a signal"), Rank(2, READY), Rank(3, STARTING))
    assert found == [
        "waiting for rank 1 (process 10), stopped by a signal, rank 3 (process 30) to start, for 21 s now"
    ]


def test_who_is_silent_while_it_loads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = said(caplog, Rank(1, READY, SAY_S + 1, "stopped by a signal"), Rank(2, READY), Rank(3, IDLE, SAY_S + 1))
    assert found == [
        "rank 1 (process 10), stopped by a signal, gave no sign of life for 20 s while the model is loaded"
    ]


def test_nothing_is_said_of_ranks_that_load_or_have_loaded(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, Rank(1, READY), Rank(2, IDLE, SAY_S + 1)) == []
