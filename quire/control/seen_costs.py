"""What steps take beside their rows and guesses, as the engine sees it, for each number of sequences.

Owns two estimates by powers of two of sequences. Does not own what is measured at the start (`planner/drafts.py`).
Invariants: a size that was never seen has what the start measured, a plain step of it what the nearest seen size has.
Of the two kinds of steps one may not come for a long time; it is taken to have become slower or faster as the other.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from quire.planner.drafts import DraftCosts

NEW_SHARE: Final = 0.1
"""Of the step that has just ended, in what is known of the cost of steps of its kind, for each step since the last of
its kind, up to `MOST_STALE`. The first ones of a kind have the share of a mean."""
MOST_STALE: Final = 7
FEW: Final = 8
"""Steps without drafts of one size, which do not say yet whether the machine has become slower."""
FIRST: Final = 4
MOST_MOVED: Final = 3.0
"""Times the rows of one of the first steps with drafts: by how much it can be thought to be too long."""


@dataclasses.dataclass(slots=True)
class Seen:
    """An estimate, and the step that changed it last."""

    seconds: float
    step: int
    n_seen: int = 1
    """With what the start measured of steps with drafts."""

    def see(self, seconds: float, most_s: float, step: int) -> None:
        """One more, which moves it by its share of `most_s` at most: one long step may be an accident."""
        self.n_seen += 1
        share = max(1 / self.n_seen, 1 - (1 - NEW_SHARE) ** min(step - self.step, MOST_STALE))
        self.seconds += share * min(max(seconds - self.seconds, -most_s), most_s)
        self.step = step


@enum.unique
class StepKind(enum.Enum):
    """Of steps without prompts."""

    PLAIN = enum.auto()
    BEHIND = enum.auto()
    """Without drafts, behind one with some, for which it has waited."""
    BEGINNING = enum.auto()
    """With drafts, for a sequence that had none in the step before: its drafter reads what it has missed, and what is
    found is in no cache."""
    DRAFTED = enum.auto()
    """With drafts otherwise."""


class SeenCosts:
    """See the module."""

    def __init__(self, costs: DraftCosts) -> None:
        self._costs, self._n_steps = costs, 0
        self._plain: dict[int, Seen] = {}
        self._exposed: dict[int, Seen] = {}
        self._beginning: dict[int, Seen] = {}
        self._behind: dict[int, Seen] = {}

    @property
    def knows_plain(self) -> bool:
        """Whether any step without drafts was seen."""
        return bool(self._plain)

    def plain_s(self, n_seqs: int) -> float:
        """Of a step without drafts, over one of so many rows as the start measured it: longer contexts, a slower host.

        A step with drafts takes that, too.
        """
        if not self._plain:
            return 0.0
        size = n_seqs.bit_length()
        seen_s = self._plain[min(self._plain, key=lambda seen: abs(seen - size))].seconds
        return self._costs.whole_s(n_seqs, seen_s) - self._costs.seconds(n_seqs)

    def plain_step_s(self, n_seqs: int) -> float:
        """Of a step without drafts, all of it."""
        return self._costs.seconds(n_seqs) + self.plain_s(n_seqs)

    def exposed_s(self, n_seqs: int) -> float:
        """Of a step with drafts within a run of such, beyond its rows, its guesses and what a plain step takes."""
        seen = self._exposed.get(n_seqs.bit_length())
        return self._costs.exposed(n_seqs) if seen is None else seen.seconds

    def beginning_s(self, n_seqs: int) -> float:
        """The same of the first one."""
        seen = self._beginning.get(n_seqs.bit_length())
        return self.exposed_s(n_seqs) if seen is None else max(seen.seconds, self.exposed_s(n_seqs))

    def behind_s(self, n_seqs: int) -> float:
        """The same of a step without drafts behind it."""
        seen = self._behind.get(n_seqs.bit_length())
        return self.exposed_s(n_seqs) if seen is None else max(0.0, seen.seconds)

    def forget(self, n_seqs: int) -> None:
        """What was seen of steps with drafts of so many sequences."""
        self._exposed.pop(n_seqs.bit_length(), None)

    def time(self, n_seqs: int, n_drafted: Sequence[int], seconds: float, kind: StepKind) -> None:
        """A step of so many sequences took so long from the end of the one before it; n_drafted: as in `StepResult`."""
        self._n_steps += 1
        size, rows_s = n_seqs.bit_length(), self._costs.seconds(n_seqs + sum(n_drafted))
        beside_s = seconds - rows_s - self._costs.guesses_s(n_drafted)
        if kind is StepKind.DRAFTED:
            known = self._exposed.setdefault(size, Seen(self._costs.exposed(n_seqs), self._n_steps - 1))
            most_s = (MOST_MOVED if known.n_seen < FIRST else 1.0) * rows_s
            known.see(beside_s - self.plain_s(n_seqs), most_s, self._n_steps)
            if known.seconds < 0 and size in self._plain:  # it takes what a plain one does: that is less by now
                self._plain[size].seconds += known.seconds
                known.seconds = 0.0
        elif kind in (StepKind.BEGINNING, StepKind.BEHIND):
            lone = self._beginning if kind is StepKind.BEGINNING else self._behind
            known = lone.setdefault(size, Seen(self.exposed_s(n_seqs), self._n_steps - 1))
            known.see(beside_s - self.plain_s(n_seqs), MOST_MOVED * rows_s, self._n_steps)
        elif kind is StepKind.PLAIN:
            known = self._plain.setdefault(size, Seen(self.plain_s(n_seqs), self._n_steps - 1, 0))
            before_s, exposed = known.seconds, self._exposed.get(size)
            known.see(beside_s, rows_s, self._n_steps)
            if exposed is None:
                pass
            elif known.n_seen <= FEW:  # what was taken for a cost of drafts is one of all steps
                exposed.seconds = max(0.0, exposed.seconds - (known.seconds - before_s))
            elif rows_s + before_s > 0:  # the machine is slower, or faster, for both kinds
                exposed.seconds *= max(0.0, rows_s + known.seconds) / (rows_s + before_s)
