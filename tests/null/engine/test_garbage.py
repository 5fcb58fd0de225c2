"""The collector is quiet for a batch and afterwards as it was."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from quire.engine import garbage
from quire.engine.garbage import THRESHOLDS, Freezer, gc_kept_quiet, no_gc, quiet_gc


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program; `conftest.py` freezes what all tests keep."""
    monkeypatch.setattr(garbage, "FREEZER", Freezer())
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def pauses() -> Iterator[list[float]]:
    """Seconds of work of each collection; afterwards the collector is as it was."""
    found, began_s, thresholds = [], 0.0, gc.get_threshold()

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        else:
            found.append(time.thread_time() - began_s)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_o10_pauses_are_short_beside_a_large_heap(pauses: list[float]) -> None:
    """What a server does all day: objects in cycles come and go, and some thousands of them live for a while."""
    heap = [[i] for i in range(800_000)]
    quiet_gc()
    pauses.clear()
    alive: list[dict[str, object]] = [{}] * 20_000
    for i in range(400_000):
        one: dict[str, object] = {"id": i}
        one["self"] = one
        alive[i % len(alive)] = one
    longest_s, n_pauses = max(pauses), len(pauses)
    assert n_pauses > 20 and longest_s < 0.05, longest_s
    gc.unfreeze()
    gc.collect()
    assert pauses[-1] > 3 * longest_s and len(heap) == 800_000, "the heap was too small to show anything"


def test_all_is_as_it_was_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), gc_kept_quiet():
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 1000
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        n_frozen = gc.get_freeze_count()
        with gc_kept_quiet():
            pass
        assert gc.get_freeze_count() > n_frozen // 2 > 0  # frozen objects may still die by their reference count
    finally:
        gc.unfreeze()


def test_what_somebody_else_froze_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count goes through all that is frozen: 24 ms of each batch of a process that had frozen what torch brings."""
    real, counted = gc.get_freeze_count, list[int]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(real()) or counted[-1])
    gc.freeze()
    try:
        for _ in range(5):
            with gc_kept_quiet():
                pass
    finally:
        gc.unfreeze()
    assert len(counted) == 1 and counted[0] > 1000


def test_a_batch_beside_a_batch_leaves_later_ones_theirs() -> None:
    """What another batch froze is not the program's."""
    with gc_kept_quiet(), gc_kept_quiet():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    with gc_kept_quiet():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_imports_are_not_looked_through_and_stay(pauses: list[float]) -> None:
    made: list[object] = []
    with no_gc():
        for _ in range(20_000):
            made.append([made])
    n_frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert not pauses and n_frozen > 20_000 and gc.isenabled()


def test_who_has_switched_it_off_finds_it_so() -> None:
    gc.disable()
    try:
        with pytest.raises(ImportError), no_gc():
            raise ImportError
        assert not gc.isenabled()
    finally:
        gc.enable()
