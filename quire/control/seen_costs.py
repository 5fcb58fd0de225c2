"""What steps take beside their rows and guesses, as the engine sees it, for each number of sequences.

Owns two estimates by powers of two of sequences. Does not own what is measured at the start (`planner/drafts.py`).
Invariants: a size that was never seen has what the start measured, a plain step of it what the nearest seen size has.
Of the two kinds of steps one may not come for a long time; it is taken to have become slower or faster as the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from quire.planner.drafts import DraftCosts

NEW_SHARE: Final = 0.1
"""Of the step that has just ended, in what is known of the cost of steps of its kind, for each step since the last of
its kind, up to `MOST_STALE`. Of the first of its kind, too: what the start measured weighs more."""
MOST_STALE: Final = 7


@dataclasses.dataclass(slots=True)
class Seen:
    """An estimate, and the step that changed it last."""

    seconds: float
    step: int

    def see(self, seconds: float, most_s: float, step: int) -> None:
        """One more, which moves it by `most_s` at most: one long step may be an accident."""
        share = 1 - (1 - NEW_SHARE) ** min(step - self.step, MOST_STALE)
        self.seconds += share * min(max(seconds - self.seconds, -most_s), most_s)
        self.step = step


class SeenCosts:
    """See the module."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs, self._n_steps = costs, 0
        self._plain: dict[int, Seen] = {}
        self._exposed: dict[int, Seen] = {}

    def plain_s(self, n_seqs: int) -> float:
        """Of a step without drafts, over one of so many rows as the start measured it: longer contexts, a slower host.

        A step with drafts takes that, too.
        """
        if not self._plain:
            return 0.0
        size = n_seqs.bit_length()
        return self._plain[min(self._plain, key=lambda seen: abs(seen - size))].seconds

    def exposed_s(self, n_seqs: int) -> float:
        """Of a step with drafts, beyond its rows, its guesses and what a plain step takes."""
        seen = self._exposed.get(n_seqs.bit_length())
        return self._costs.exposed(n_seqs) if seen is None else seen.seconds

    def forget(self, n_seqs: int) -> None:
        """What was seen of steps with drafts of so many sequences."""
        self._exposed.pop(n_seqs.bit_length(), None)

    def time(self, n_seqs: int, n_drafted: Sequence[int], is_drafted: bool, seconds: float, times: float = 1.0) -> None:
        """A step of so many sequences took so long from the end of the one before it; n_drafted: as in `StepResult`.
        times: what its kind exposes, of what others of its kind do."""
        self._n_steps += 1
        size, rows_s = n_seqs.bit_length(), self._costs.seconds(n_seqs + sum(n_drafted))
        beside_s = seconds - rows_s - self._costs.guesses_s(n_drafted)
        if is_drafted:
            beside_s = (beside_s - self.plain_s(n_seqs)) / times
            known = self._exposed.setdefault(size, Seen(self._costs.exposed(n_seqs), self._n_steps - 1))
            known.see(beside_s, rows_s, self._n_steps)
            if known.seconds < 0 and size in self._plain:  # it takes what a plain one does: that is less by now
                self._plain[size].seconds += known.seconds
                known.seconds = 0.0
            return
        known = self._plain.setdefault(size, Seen(self.plain_s(n_seqs), self._n_steps - 1))
        before_s = rows_s + known.seconds
        known.see(beside_s, rows_s, self._n_steps)
        exposed = self._exposed.get(size)
        if exposed is not None and before_s > 0:  # the machine is slower, or faster, for both kinds
            exposed.seconds *= max(0.0, rows_s + known.seconds) / before_s
