"""`benchmarks.draft_leaks` in little: nothing is left behind, and what is kept by mistake is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.draft_leaks import DRAFTERS, leaked, run
from quire.control.live_seqs import LiveSeqs
from quire.control.pages import PagePool
from quire.engine.grammars.manager import StructuredOutput

N_REQUESTS, N_PAGES = 60, 40
Patch = pytest.MonkeyPatch


def once(real: Callable[..., Any], instead: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`real`, and `instead` for the call of this number."""
    n_calls = 0

    def call(*given: Any, **named: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return (real if n_calls != number else instead)(*given, **named)

    return call


def a_page_is_kept(patch: Patch) -> None:
    drop = PagePool.drop
    patch.setattr(PagePool, "drop", once(drop, lambda pool, pages: drop(pool, list(pages)[1:]), 50))


def a_slot_is_kept(patch: Patch) -> None:
    vacate = LiveSeqs._vacate

    def keep(live: LiveSeqs, seq: Any, *given: Any) -> None:
        vacate(live, seq, *given)
        live.free_slots[0].pop()

    patch.setattr(LiveSeqs, "_vacate", once(vacate, keep, 50))


def a_matcher_is_kept(patch: Patch) -> None:
    drop = StructuredOutput.drop_seq
    patch.setattr(StructuredOutput, "drop_seq", once(drop, lambda *given: None, 2))


@pytest.mark.parametrize("drafter", ["ngram", "eagle3 tree"])
def test_nothing_is_left(drafter: str) -> None:
    found = run(DRAFTERS[drafter], N_REQUESTS, N_PAGES)
    assert found["cancels"] and found["preemptions"] and 0 < found["drafts_right"] < found["drafts_verified"]
    assert not leaked(found), found


@pytest.mark.parametrize("plant", [a_page_is_kept, a_slot_is_kept, a_matcher_is_kept])
def test_what_is_kept_is_seen(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert leaked(run(DRAFTERS["ngram"], N_REQUESTS, N_PAGES))
