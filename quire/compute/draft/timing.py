"""What steps and drafts cost on this machine, measured when the engine starts: the numbers of `planner/drafts.py`.

Owns the measuring. Invariant: afterwards no slot is open, and only the dummy page was written.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from quire.compute.draft.drafter import DraftContext, Drafter
from quire.compute.runner.runner import Runner
from quire.compute.runner.warm_up import GREEDY
from quire.core.plan import SlotOpen, Spans, StepPlan
from quire.planner.drafts import DraftCosts

ROUNDS: Final = 5
MORE_ROUNDS: Final = 25
"""Of steps shorter than `SHORT_S`, of which five end before threads are awake and a disturbance is over."""
SHORT_S: Final = 0.002
CONTEXT: Final = 32
"""Tokens of the sequences that are timed; their keys are all on the dummy page."""
ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
SEQUENCES: Final = (1, 8, 32, 128)
"""That draft together, in steps of no more rows than those."""
LONG_S: Final = 0.02
"""Behind a step that takes so long, and has `LEAST_ROWS`, no wider one is timed."""
LEAST_ROWS: Final = 32
TOGETHER: Final = 16
"""Sequences whose guesses are timed together."""
UNREAD: Final = (64, 256, 1024)
"""Tokens that a drafter is given to read, up to the first number that takes `READ_LONG_S`."""
READ_LONG_S: Final = 0.005
READ_ROUNDS: Final = 3
OTHER_BYTES: Final = 8 << 20
"""More than a core's own caches hold."""
N_QUEUED: Final = 4
"""Steps that a device of its own is given at once: while it computes one, the host prepares the next."""


def measure(
    runner: Runner,
    drafter: Drafter,
    most: int,
    n_slots: int,
    max_model_len: int,
    *,
    branches: bool = False,
    of_all: Callable[[float], float] = lambda seconds: seconds,
) -> DraftCosts:
    """The best of some rounds each. most: drafts of a sequence; n_slots: that can be open at once. branches: drafts
    are trees, of which no more nodes are asked together than n_slots. of_all: seconds of a step on one rank → those of
    the slowest, by which all ranks time as many steps, and guess as often."""
    context = min(CONTEXT, max_model_len - 2 - most)
    opened = [SlotOpen(slot, [0] * (context + 1), context, GREEDY) for slot in range(min(n_slots, ROWS[-1]))]
    runner.launch(_plan([0], context, 0, opened)).result()
    first_s = of_all(_step_s(runner, _plan([0], context), ROUNDS))
    rounds = ROUNDS if first_s > SHORT_S else MORE_ROUNDS
    rows, step_s = list[int](), list[float]()
    for n in (n for n in ROWS if n <= n_slots):
        if rows and rows[-1] >= LEAST_ROWS and step_s[-1] > LONG_S:
            break
        rows.append(n)
        step_s.append(of_all(_step_s(runner, _plan(list(range(n)), context), rounds)))
    step_s = list(itertools.accumulate(reversed(step_s), min))[::-1]  # fewer rows never take longer: that was noise
    n_together = min(TOGETHER, max(1, len(opened) // most) if branches else len(opened))
    guess_s, together_s = (_guess_s(drafter, n, context, most, branches, rounds) for n in (1, n_together))
    each_s, place_s = _shares(guess_s / most, together_s / most, n_together)
    costs = DraftCosts(tuple(rows), tuple(step_s), each_s, place_s=place_s)
    exposed = {}
    for n in (n for n in SEQUENCES if n == 1 or 2 * n <= rows[-1]):
        each = most if n == 1 else min(most, rows[-1] // n - 1)
        plan, guesses_s = _plan(list(range(n)), context, each), costs.guesses_s([each] * n)
        measured_s = _best_step(runner, plan, rounds) - guesses_s - costs.seconds(n * (1 + each))
        in_place_s = of_all(_in_place_s(runner, plan, rounds)) - guesses_s
        exposed[n] = max(0.0, measured_s, min(in_place_s, costs.seconds(n)))  # what is more was a disturbance
    read_s = _read_s(drafter, max_model_len, of_all)
    for one in opened:
        runner.close(one.slot)
    return dataclasses.replace(costs, exposed_s=tuple(exposed.values()), exposed_seqs=tuple(exposed), read_s=read_s)


def _best_step(runner: Runner, plan: StepPlan, rounds: int) -> float:
    """Of a step that waits for nothing and is waited for."""
    return _best(lambda: runner.launch(plan).result(), rounds)


def _in_place_s(runner: Runner, plan: StepPlan, rounds: int) -> float:
    """What the host does before the native call of a step with drafts, its guesses too, when what it needs was driven
    from its caches, as a step drives it; 0 where steps are not such calls."""
    if runner.prepare(_plan(plan.spans.slots, plan.spans.starts[0])) is None:
        return 0.0
    others, found = np.zeros(OTHER_BYTES, np.uint8), list[float]()
    for _ in range(rounds):
        others += 1
        found.append(runner.launch(plan).result().timings.host_s)
    return min(found)


def _guess_s(drafter: Drafter, n: int, context: int, most: int, branches: bool, rounds: int) -> float:
    """Of `most` guesses for each of n sequences, asked together."""
    tokens = np.zeros(context + 1, np.int32)
    return _best(lambda: drafter.guess([DraftContext(slot, tokens, most, branches) for slot in range(n)]), rounds)


def _read_s(drafter: Drafter, max_model_len: int, of_all: Callable[[float], float] = lambda seconds: seconds) -> float:
    """Of one token of a text that slot 0, which is open, has anew. of_all: as `measure`."""

    def guess(n: int, *, is_new: bool) -> float:
        if is_new:
            drafter.open(0, "", n)
        start_s = time.perf_counter()
        drafter.guess([DraftContext(0, np.zeros(n, np.int32), 1)])
        return time.perf_counter() - start_s

    found_s = 0.0
    for n in (n for n in UNREAD if n < max_model_len):
        new_s = of_all(min(guess(n, is_new=True) for _ in range(READ_ROUNDS)))
        known_s = min(guess(n, is_new=False) for _ in range(READ_ROUNDS))
        found_s = max(0.0, new_s - known_s) / n
        if new_s > READ_LONG_S:
            break
    return found_s


def _shares(one_s: float, together_s: float, n: int) -> tuple[float, float]:
    """Seconds of each sequence and of a place, where a place of one takes one_s and that of n together_s."""
    if n == 1:
        return one_s, 0.0
    each_s = min(max(0.0, (together_s - one_s) / (n - 1)), one_s)
    return each_s, one_s - each_s


def _step_s(runner: Runner, plan: StepPlan, rounds: int) -> float:
    """Of a step that was made ready before, where steps are; else of one of several that are queued at once."""
    ready = runner.prepare(plan)
    if ready is None:
        n = 1 if runner.tables.is_shared else N_QUEUED
        return _best(lambda: [one.result() for one in [runner.launch(plan) for _ in range(n)]], rounds) / n
    ready.hurry()
    return _best(ready.compute, rounds)


def _plan(slots: list[int], context: int, n_drafts: int = 0, opened: list[SlotOpen] | None = None) -> StepPlan:
    n = len(slots)
    spans = Spans(slots, [context] * n, [1 + n_drafts] * n, [n_drafts] * n, [True] * n)
    return StepPlan(0, spans, n * (1 + n_drafts), opened=opened or [])


def _best(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        start_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start_s)
    return best
