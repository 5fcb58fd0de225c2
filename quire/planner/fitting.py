"""Fits a calibration to steps that were timed: coordinate descent on the logarithms of its numbers.

Owns the search. Does not own what is measured (`bench/calibrate`) nor the model (`timing`). Numbers stay positive; one
that does not matter stays where it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.core.plan import Spans
from quire.planner.calibration import Calibration, Curve
from quire.planner.formats import Formats
from quire.planner.parts import RankParts, rank_parts
from quire.planner.timing import StepTimer

FIRST_FACTOR, LAST_FACTOR = 1.5, 1.004
LEAST_GAIN: Final = 1e-9
LEAST_SHARE: Final = 1e-3
"""Of the loss: where a round of all numbers gains less, the next ones go in smaller steps. If any gain counted, the fit
of a GPU's 28 steps would take 24 s, not 1.3, and the worst of them be 3.6 % off, not 3.9."""
CURVES: Final = ("attention", "state", "row_kernels")

Knob = tuple[str, str, int]
"""(part, field, place): a number of a curve, also of `products.FORMAT` and such; with an empty field a number of the
file."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was timed."""

    name: str
    arch: ModelArch
    formats: Formats
    spans: Spans
    seconds: float
    waits: bool = False
    """A first token: `first_token_s` is part of it."""
    weight: float = 1.0
    """Of its error among those of others."""

    def expected_s(self, calibration: Calibration, parts: RankParts | None = None) -> float:
        """With a calibration. parts: of its model, where they are known."""
        timer = StepTimer(self.arch, calibration, self.formats, Mesh(), parts=parts)
        return timer.step_s(self.spans) + (calibration.first_token_s if self.waits else 0.0)


def sample_loss(samples: Sequence[Sample], calibration: Calibration, parts: Sequence[RankParts | None] = ()) -> float:
    """Squares of relative errors, by weight. parts: of each sample's model, or none."""
    pairs = zip(samples, parts or [None] * len(samples), strict=True)
    return sum(one.weight * (one.expected_s(calibration, own) / one.seconds - 1) ** 2 for one, own in pairs)


def fit(start: Calibration, samples: Sequence[Sample], knobs: Sequence[Knob]) -> Calibration:
    """The calibration with the least `sample_loss` that turning these numbers finds."""
    parts = [rank_parts(one.arch, Mesh(), one.formats) for one in samples]
    return descend(start, lambda tried: sample_loss(samples, tried, parts), knobs)


def descend(
    start: Calibration,
    loss: Callable[[Calibration], float],
    knobs: Sequence[Knob],
    least_share: float = LEAST_SHARE,
) -> Calibration:
    """One number after the other, up or down, in smaller and smaller steps."""
    best, value, factor = start, loss(start), FIRST_FACTOR
    while factor > LAST_FACTOR:
        before = value
        for knob in knobs:
            for times in (factor, 1 / factor):
                tried = turned(best, knob, times)
                found = loss(tried)
                if found < value - LEAST_GAIN:
                    best, value = tried, found
        if value >= before * (1 - least_share):
            factor = 1 + (factor - 1) / 2
    return best


def turned(calibration: Calibration, knob: Knob, times: float) -> Calibration:
    """With one number so many times as large."""
    part, field, place = knob
    if not field:
        return msgspec.structs.replace(calibration, **{part: getattr(calibration, part) * times})
    old: Any = getattr(curve_of(calibration, part), field)
    new: Any = (
        tuple(one * times if i == place else one for i, one in enumerate(old))
        if isinstance(old, tuple)
        else old * times
    )
    changed = msgspec.structs.replace(curve_of(calibration, part), **{field: new})
    name, _, kind = part.partition(".")
    return msgspec.structs.replace(
        calibration, **{name: getattr(calibration, name) | {kind: changed} if kind else changed}
    )


def curve_of(calibration: Calibration, part: str) -> Curve:
    """By the name of a knob."""
    name, _, kind = part.partition(".")
    found = getattr(calibration, name)[kind] if kind else getattr(calibration, name)
    assert isinstance(found, Curve)
    return found


def curve_knobs(calibration: Calibration, part: str, fields: Sequence[str]) -> list[Knob]:
    """Every number of these fields."""
    curve = curve_of(calibration, part)
    found: list[Knob] = []
    for field in fields:
        value = getattr(curve, field)
        found += [(part, field, i) for i in range(len(value) if isinstance(value, tuple) else 1)]
    return found
