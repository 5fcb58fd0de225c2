"""What reading costs a drafter, by a clock that it moves itself; and that a real one is timed."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest

from quire import LLM
from quire.compute.draft import timing
from quire.compute.draft.drafter import DraftContext
from quire.core.clock import VirtualClock


class Reader:
    """Takes `each_s` for a token of slot 0 that it has not read, and 1 ms for anything."""

    def __init__(self, clock: VirtualClock, each_s: float) -> None:
        self._clock, self._each_s, self._n_read, self.n_most = clock, each_s, 0, 0

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        self._n_read = 0

    def close(self, slot: int, tokens: object) -> None:
        raise AssertionError("whoever opened the slot closes it")

    def guess(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        n = len(contexts[0].tokens)
        self._clock.advance(0.001 + self._each_s * (n - self._n_read))
        self._n_read, self.n_most = n, max(n, self.n_most)
        return [[0]]


@pytest.mark.parametrize(("each_s", "n_most"), [(0.0, 256), (2e-6, 256), (1e-4, 64)])
def test_reading_is_what_a_new_text_takes_longer(monkeypatch: pytest.MonkeyPatch, each_s: float, n_most: int) -> None:
    """Of as many tokens as a sequence may have, or fewer that take long."""
    clock = VirtualClock()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=clock.now_s))
    drafter = Reader(clock, each_s)
    assert timing._read_s(drafter, 300) == pytest.approx(each_s)
    assert drafter.n_most == n_most


@pytest.mark.parametrize("is_native", [True, False])
def test_what_a_host_does_before_a_step_is_timed_where_the_rest_is_one_native_call(is_native: bool) -> None:
    """The best of some rounds, as all that is measured: a disturbance is none of it."""
    took_s, plans = iter([3e-4, 9.0, 2e-4, 4e-4, 1e-4]), list[Any]()

    def launch(plan: Any) -> Any:
        plans.append(plan)
        timings = types.SimpleNamespace(host_s=next(took_s))
        return types.SimpleNamespace(result=lambda: types.SimpleNamespace(timings=timings))

    runner: Any = types.SimpleNamespace(prepare=lambda plan: plan if is_native else None, launch=launch)
    plan = timing._plan([0, 1], 32, 3)
    assert timing._in_place_s(runner, plan, 5) == (1e-4 if is_native else 0.0)
    assert plans == [plan] * (5 if is_native else 0)


def test_costs_are_measured_at_the_start() -> None:
    llm = LLM("", speculative_config={"method": "ngram"})
    costs = llm.engine.scheduler.live.drafts.costs
    assert costs is not None and costs.rows[0] == 1 and min(costs.step_s) > 0 and costs.guess_s > 0
    llm.shutdown()
