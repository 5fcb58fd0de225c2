"""How many drafts each sequence's next span verifies: by what became of its drafts so far, and what a row costs.

Owns the estimates, of chances and of what steps cost beside their rows, and when a sequence is asked again. Does not
own the trade (`planner/drafts.py`), nor room for drafts (`drafting.py`).
Invariant: where drafts do not pay, they take at most about `PROBE_SHARE` of the time: such a sequence takes part in so
few steps with drafts that these are no longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quire.control.acceptance import LONG_MEMORY, Acceptance
from quire.control.seq import Seq
from quire.planner.drafts import LEAST_GAIN, DraftCosts

FIRST_RATE: Final = 0.7
FIRST_DRAFTS: Final = 4.0
"""The chance of a draft before anything is known, and as of how many drafts it counts."""
NEW_SHARE: Final = 0.1
"""Of the step that has just ended, in what is known of the cost of steps of its kind, for each step since the last of
its kind, up to `MOST_STALE`."""
MOST_STALE: Final = 7
PROBE_SHARE: Final = 0.01
MOST_STREAK: Final = 3
"""Right probes in a row, each longer than the one before, after which a sequence for which drafts still do not pay is
left alone."""
BEGINNING: Final = 1.25
"""Times what is exposed, of the first of a run of steps with drafts: the step behind the run waits, too."""
MOST_QUIET: Final = 256
"""Steps after which a sequence is asked again at the latest."""


class DraftPolicy:
    """See the module. costs: None gives every sequence as many as it may have."""

    def __init__(self, most: int, costs: DraftCosts | None) -> None:
        self.most, self.costs = most, costs
        self._all = Acceptance(FIRST_RATE * FIRST_DRAFTS, FIRST_DRAFTS)
        """Of all sequences: what a new one begins with."""
        self._is_drafting = False
        """Whether the newest choice gave drafts that pay: a step with them is one anyway."""
        self._drafted_at = -1
        """The step of the newest choice that gave any drafts."""
        self._exposed_s = costs.exposed_s if costs is not None else 0.0
        self._plain_s = 0.0
        """What steps with drafts, and without, take beside their rows and guesses; as seen."""
        self._n_since = [0, 0]
        """Steps since the last without drafts, and with."""
        self.n_spans = self.n_verified = 0
        """Spans that verified drafts, and these drafts."""
        self.n_right = [0] * most
        """Of these, the right ones at each place behind the known token."""

    def choose(self, seqs: Sequence[Seq], n_rows: int, n_free: int, step: int) -> list[int]:
        """Drafts for each of these, which decode and are not left alone, in a step of `n_rows` rows without them and
        `n_free` to spare."""
        most = min(self.most, n_free)
        if self.costs is None:
            return [min(most, n_free // len(seqs))] * len(seqs)
        rates = [self._of(seq).rate_beside(self._all.rate) for seq in seqs]
        exposed_s = self._exposed_s * (1.0 if self._drafted_at == step - 1 else BEGINNING)
        lengths = self.costs.choose(rates, most, n_rows, n_free, exposed_s, self._plain_s)
        n_left = n_free - sum(lengths)
        self._is_drafting = any(lengths)
        for i, seq in enumerate(seqs):
            own = self._of(seq)
            if lengths[i]:
                own.n_streak = 0
                continue
            if own.n_streak is not None and n_left > 0:  # to see whether it has become better
                lengths[i] = min(most, n_left, 4**own.n_streak)
                n_left -= lengths[i]
            own.n_streak = own.n_streak or 0
            self._leave(seq, step, n_rows, MOST_QUIET)
        if any(lengths):
            self._drafted_at = step
        return lengths

    def takes(self, n_sure: int, n_rows: int, step: int) -> bool:
        """Whether a step of `n_rows` rows should have so many drafts more that are right for sure."""
        if not n_sure:
            return False
        if self.costs is not None:
            exposed_s = self._exposed_s * (1.0 if self._drafted_at == step - 1 else BEGINNING)
            drafted_s = self.costs.seconds(n_rows + n_sure) + exposed_s
            if (n_rows + n_sure) * (self.costs.seconds(n_rows) + self._plain_s) < LEAST_GAIN * n_rows * drafted_s:
                return False
        self._drafted_at = step
        return True

    def time(self, n_rows: int, n_guesses: int, is_drafted: bool, seconds: float) -> None:
        """A step of `n_rows` rows, drafts among them, took so long from the end of the one before it."""
        if self.costs is None:
            return
        rows_s = self.costs.seconds(n_rows)
        known_s = self._exposed_s if is_drafted else self._plain_s
        seen_s = seconds - rows_s - n_guesses * self.costs.guess_s
        self._n_since[not is_drafted] += 1
        n_steps, self._n_since[is_drafted] = min(self._n_since[is_drafted] + 1, MOST_STALE), 0
        share = 1 - (1 - NEW_SHARE) ** n_steps
        change_s = share * min(max(seen_s - known_s, -rows_s), rows_s)  # one long step may be an accident
        if is_drafted:
            self._exposed_s += change_s
        else:
            self._plain_s += change_s

    def count(
        self, seq: Seq, step: int, n_asked: int, n_verified: int, n_right: int, n_rows: int, *, is_sure: bool = False
    ) -> None:
        """A step of `n_rows` sequences had asked for so many drafts of this one, and verified those that were found.
        is_sure: they were foretold, which says nothing of guesses."""
        if n_verified:
            self.n_spans += 1
            self.n_verified += n_verified
            for place in range(n_right):
                self.n_right[place] += 1
        if self.costs is None or is_sure:
            return
        own, rate = self._of(seq), self._of(seq).rate_beside(self._all.rate)
        own.count(n_asked, n_right)
        self._all.count(n_asked, n_right, LONG_MEMORY)
        if n_right < max(1, n_verified):
            own.n_streak = 0
        elif own.n_streak is not None:
            own.n_streak = min(own.n_streak + 1, MOST_STREAK)
            if own.n_streak < MOST_STREAK and rate < FIRST_RATE:
                seq.drafts_from = 0  # a right probe of one that is thought to be wrong: a longer one follows at once
        if own.n_vain > 1:
            self._leave(seq, step, n_rows, 2 ** min(own.n_vain, 8))

    def _leave(self, seq: Seq, step: int, n_rows: int, most: int) -> None:
        """Leave a sequence alone, for `most` steps or until asking all of them is `PROBE_SHARE` of the steps between.

        A step in which one is asked waits for the step before it, and the next one for that, unless there are drafts in
        it anyway. So periods are powers of two and end together: such a step asks all that are due.
        """
        assert self.costs is not None
        rows_s = self.costs.seconds(n_rows)
        asking_s = n_rows * self.costs.guess_s + self.costs.seconds(2 * n_rows) - rows_s
        if not self._is_drafting:
            asking_s += 2 * (self._exposed_s - self._plain_s)
        n_steps = min(MOST_QUIET, most, math.ceil(asking_s / (PROBE_SHARE * (rows_s + self._plain_s))))
        period = 1 << max(0, n_steps - 1).bit_length()
        seq.drafts_from = (step // period + 1) * period

    def _of(self, seq: Seq) -> Acceptance:
        if seq.acceptance is None:
            seq.acceptance = Acceptance(self._all.rate, 1.0)
        return seq.acceptance
