"""What became of a sequence's drafts, and what that says about its next one."""

from __future__ import annotations

import dataclasses
from typing import Final

from quire.control.repeats import Repeats

MEMORY: Final = 0.9
"""Of a sequence's drafts before, weighed against one more."""
LONG_MEMORY: Final = 0.98
"""Of those of all sequences."""
PRIOR: Final = 8.0
"""Drafts at each place that are taken to have gone as those at all places do."""
FIRST_DRAFTS: Final = 4.0
"""As of how many drafts a chance counts that was assumed before anything was known."""
LEAST_TRIED: Final = 0.35
"""Chance of a draft below which it is not tried where drafts do not seem to pay."""
OTHERS: Final = 5.0
"""Drafts that are taken to have gone as those of all do, beside a sequence's own."""


@dataclasses.dataclass(slots=True)
class Acceptance:
    """What became of a sequence's drafts."""

    n_right: float
    n_verified: float
    """Both fade: the last ten drafts or so count. A draft behind a wrong one says nothing and is not counted; one that
    was asked for and not found counts as wrong."""
    n_vain: int = 0
    """Times in a row that it was asked and no draft was kept, or none was found."""
    n_streak: int | None = None
    """Right probes in a row; None: it was never left alone."""
    repeats: Repeats | None = None
    """Of a sequence that was left alone, where drafts are what stood before."""
    until: int = 0
    """The step up to which it would be left alone if it had not begun to copy."""
    is_promised: bool = False
    """It began to copy, and no draft was verified since."""
    drafted_at: int = -2
    """The newest step that was given drafts of it."""
    n_read: int = 0
    """Its tokens before that step, which a drafter that reads texts has seen."""

    @property
    def rate(self) -> float:
        """The chance that its next draft is right."""
        return self.n_right / self.n_verified

    def rate_beside(self, others: float) -> float:
        """Its rate with `OTHERS` drafts more, right as often as others' are: a few wrong ones may be chance."""
        return (self.n_right + OTHERS * others) / (self.n_verified + OTHERS)

    def promise(self, rate: float, n_drafts: int) -> None:
        """It began to copy: its next drafts are right with this chance, as if so many had been verified."""
        self.n_right, self.n_verified, self.n_vain, self.is_promised = rate * n_drafts, n_drafts, 0, True

    def count(self, n_asked: int, n_right: int, memory: float = MEMORY) -> None:
        """Of the drafts that a step was to verify the first `n_right` were found and right."""
        n_trials = min(n_asked, n_right + 1)
        faded = memory**n_trials
        self.n_right = faded * self.n_right + n_right
        self.n_verified = faded * self.n_verified + n_trials
        self.n_vain = 0 if n_right else self.n_vain + 1


class Places:
    """What became of the drafts of all sequences, by their place behind the known token: the first guess of a head is
    wrong more often than those that follow a right one."""

    def __init__(self, most: int) -> None:
        self._n_right, self._n_tried = [0.0] * most, [0.0] * most

    def count(self, n_asked: int, n_right: int) -> None:
        """As `Acceptance.count`."""
        n_trials = min(n_asked, n_right + 1)
        self._n_tried = [LONG_MEMORY * n + (place < n_trials) for place, n in enumerate(self._n_tried)]
        self._n_right = [LONG_MEMORY * n + (place < n_right) for place, n in enumerate(self._n_right)]

    @property
    def factors(self) -> list[float]:
        """Of each place the chance of a draft behind right ones, over that of all drafts."""
        mean = sum(self._n_right) / max(1.0, sum(self._n_tried))
        if not mean:
            return [1.0] * len(self._n_tried)
        columns = zip(self._n_right, self._n_tried, strict=True)
        return [(right + PRIOR * mean) / (tried + PRIOR) / mean for right, tried in columns]
