"""What steps and drafts cost on this machine, measured when the engine starts: the numbers of `planner/drafts.py`.

Owns the measuring. Invariant: afterwards no slot is open, and only the dummy page was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from quire.compute.draft.drafter import DraftContext, Drafter
from quire.compute.runner.runner import GREEDY, Runner
from quire.core.plan import SlotOpen, Spans, StepPlan
from quire.planner.drafts import DraftCosts

ROUNDS: Final = 5
CONTEXT: Final = 32
"""Tokens of the sequences that are timed; their keys are all on the dummy page."""
ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
LONG_S: Final = 0.02
"""Behind a step that takes so long, and has `LEAST_ROWS`, no wider one is timed."""
LEAST_ROWS: Final = 32
N_QUEUED: Final = 4
"""Steps that a device of its own is given at once: while it computes one, the host prepares the next."""


def measure(runner: Runner, drafter: Drafter, most: int, n_slots: int, max_model_len: int) -> DraftCosts:
    """The best of a few rounds each. most: drafts of a sequence; n_slots: that can be open at once."""
    context = min(CONTEXT, max_model_len - 2 - most)
    opened = [SlotOpen(slot, [0] * (context + 1), context, GREEDY) for slot in range(min(n_slots, ROWS[-1]))]
    runner.launch(_plan([0], context, 0, opened)).result()
    rows, step_s = list[int](), list[float]()
    for n in (n for n in ROWS if n <= n_slots):
        if rows and rows[-1] >= LEAST_ROWS and step_s[-1] > LONG_S:
            break
        rows.append(n)
        step_s.append(_step_s(runner, _plan(list(range(n)), context)))
    tokens = np.zeros(context + 1, np.int32)
    guess_s = _best(lambda: drafter.guess([DraftContext(0, tokens, most, may_branch=True)]))
    drafted_s = _best(lambda: runner.launch(_plan([0], context, most)).result())
    for one in opened:
        runner.close(one.slot)
    costs = DraftCosts(tuple(rows), tuple(step_s), guess_s / most)
    exposed_s = max(0.0, drafted_s - guess_s - costs.seconds(1 + most))
    return DraftCosts(costs.rows, costs.step_s, costs.guess_s, exposed_s)


def _step_s(runner: Runner, plan: StepPlan) -> float:
    """Of a step that was made ready before, where steps are; else of one of several that are queued at once."""
    ready = runner.prepare(plan)
    if ready is None:
        n = 1 if runner.tables.is_shared else N_QUEUED
        return _best(lambda: [one.result() for one in [runner.launch(plan) for _ in range(n)]]) / n
    ready.hurry()
    return _best(ready.compute)


def _plan(slots: list[int], context: int, n_drafts: int = 0, opened: list[SlotOpen] | None = None) -> StepPlan:
    n = len(slots)
    spans = Spans(slots, [context] * n, [1 + n_drafts] * n, [n_drafts] * n, [True] * n)
    return StepPlan(0, spans, n * (1 + n_drafts), opened=opened or [])


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start_s)
    return best
