"""How far a plan may be off: as far as recorded runs of whole models of its kind lay beside what was expected of them.

Owns what makes a kind, and the rule. Does not own the record (`Calibration.records`), which
`python -m benchmarks.plan_against_measured --write` makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quire.planner.calibration import Calibration, Record
from quire.planner.formats import FLOATING
from quire.planner.timing import StepTimer

UNMEASURED: Final = 0.1
"""Added where no run of a kind is on record: a guess, as there is nothing to take it from."""
NARROWEST: Final = 1024
"""Hidden size of the narrowest model (Qwen3-0.6B) of which there are runs."""
MOST_USUAL: Final = 0.15
"""Of an error bar: the widest limit that docs/plan.md holds runs to."""
EXPERTS, LATENT, STATES = "experts", "latent attention", "recurrent layers"
WINDOWS, NARROW = "two kinds of windows", "a width below 1,024"
TENSOR, STAGES = "layers divided among ranks (tp)", "stages (pp)"
EXPERT_RANKS = "experts divided among ranks (ep)"
SEQUENCE, RING = "tokens divided among ranks (sp)", "tokens divided among ranks (ring)"


def kinds_of(timer: StepTimer) -> frozenset[str]:
    """What a plain dense model in bfloat16 on one device has not."""
    parts, formats, mesh = timer.parts, timer.formats, timer.mesh
    has = {
        EXPERTS: any(one.is_experts for one in parts.products),
        LATENT: any(one.has_other_way for one in parts.attentions),
        STATES: bool(parts.states),
        WINDOWS: len({one.window for one in parts.attentions}) > 1,
        TENSOR: mesh.tp > 1,
        STAGES: mesh.pp > 1,
        EXPERT_RANKS: mesh.ep > 1,
        SEQUENCE: mesh.sp > 1,
        RING: mesh.ring > 1,
        NARROW: timer.arch.hidden_size < NARROWEST,
        f"weights in {formats.weights.name}": formats.weights.is_rounded,
        f"keys and values in {formats.kv}": formats.kv not in FLOATING,
    }
    return frozenset(kind for kind, is_so in has.items() if is_so)


def error_bar(timer: StepTimer) -> float:
    """Relative, either way: 0.1 says that a time may be a tenth longer, or as much shorter.

    That of the runs that are alike; where there are none, of those that have some of the same and nothing else, and
    more for each thing that no run had. Never less than a plain model's, nor than the error of the calibration; where
    this is assumed, it is added, since the runs were another device's.
    """
    calibration, (_, least) = timer.calibration, farthest(kinds_of(timer), timer.calibration)
    return calibration.error + least if calibration.is_assumed else max(calibration.error, least)


def farthest(kinds: frozenset[str], calibration: Calibration) -> tuple[Record | None, float]:
    """The record that speaks for such runs, None without any; and the error bar by records alone."""
    alike = [one for one in calibration.records if kinds.issuperset(one.kinds)]
    own = [one for one in alike if kinds == set(one.kinds)]
    plain = [one for one in alike if not one.kinds]
    nearest = [one for one in alike if not any(set(one.kinds) < set(other.kinds) for other in alike)]
    worst = max((own or nearest) + plain, key=lambda one: one.error, default=None)
    known = worst.error if worst else 0.0
    if own or not kinds:
        return worst, known
    n_unmeasured = len(kinds.difference(*(one.kinds for one in alike)))
    return worst, known + UNMEASURED * max(1, n_unmeasured)


def error_words(timer: StepTimer) -> str:
    """Where runs on record say that such plans are worse than most; empty: they do not."""
    worst, _ = farthest(kinds_of(timer), timer.calibration)
    if worst is None or worst.error <= MOST_USUAL:
        return ""
    kinds = ", ".join(worst.kinds) or "plain models"
    if not worst.farthest:  # of a machine that somebody calibrated
        return f"{kinds}: nine of ten steps of the calibration are within {100 * worst.error:.0f} % of what it expects"
    return (
        f"{kinds}: expectations are worse than of other models; of {worst.n_figures} figures on"
        f" record the farthest, {worst.farthest}, is {100 * worst.error:.0f} % off (docs/plan.md says why)"
    )


def record_of(kinds: frozenset[str], figures: Sequence[tuple[float, str]]) -> Record:
    """figures: measured to expected, and which one that is. In whole hundredths, never too few."""
    factor, name = max((max(ratio, 1 / ratio), name) for ratio, name in figures)
    error = math.ceil(100 * (factor - 1)) / 100
    return Record(kinds=tuple(sorted(kinds)), n_figures=len(figures), error=error, farthest=name)
