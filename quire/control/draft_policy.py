"""How many drafts each sequence's next span verifies: by what became of its drafts so far, and what a row costs.

Owns the estimates of chances, and when a sequence is asked again. Does not own the trade (`planner/drafts.py`), what
steps take (`seen_costs.py`) nor room for drafts (`drafting.py`).
Invariant: where drafts do not pay, they take at most about `PROBE_SHARE` of the time: such a sequence takes part in so
few steps with drafts that these are no longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quire.control.acceptance import LONG_MEMORY, Acceptance, Places
from quire.control.repeats import Repeats
from quire.control.seen_costs import SeenCosts
from quire.control.seq import Seq
from quire.planner.drafts import LEAST_GAIN, DraftCosts

FIRST_RATE: Final = 0.7
FIRST_DRAFTS: Final = 4.0
"""The chance of a draft before anything is known, and as of how many drafts it counts."""
PROBE_SHARE: Final = 0.01
MOST_STREAK: Final = 3
"""Right probes in a row, each longer than the one before, after which a sequence for which drafts still do not pay is
left alone."""
BEGINNING: Final = 1.25
"""Times what is exposed, of the first of a run of steps with drafts: the step behind the run waits, too."""
MOST_QUIET: Final = 256
"""Steps after which a sequence is asked again at the latest."""
TRIAL: Final = 12
"""Steps with drafts, of one sequence, before drafts are thought not to pay: the chance of a draft and what such steps
really take are known only then."""
LEAST_TRIED: Final = 0.35
"""Chance of a draft below which the trial is over."""
AGAIN_EVERY: Final = 1024
"""Steps after which what was seen of steps with drafts is forgotten, if by that alone drafts do not pay: lone probes
wait longer than the steps of a run, and what they taught may be of a busy minute. Twice as many each time."""
MOST_AGAIN: Final = 1 << 15


class DraftPolicy:
    """See the module. costs: None gives every sequence as many as it may have. copies: drafts are what stood before,
    so that a text which repeats itself promises some."""

    def __init__(self, most: int, costs: DraftCosts | None, *, copies: bool = False) -> None:
        self.most, self.costs = most, costs
        self.watches = copies and most > 0 and costs is not None
        """Sequences that are left alone are to be shown to `watch`."""
        self._n_tried = 0
        """Steps that were given drafts, up to `TRIAL`."""
        self._forgets_from = AGAIN_EVERY
        self._again_every = AGAIN_EVERY
        """The step from which on that is forgotten, and how many there are from one time to the next."""
        self._all = Acceptance(FIRST_RATE * FIRST_DRAFTS, FIRST_DRAFTS)
        """Of all sequences: what a new one begins with."""
        self._places = Places(most)
        self._is_drafting = False
        """Whether the newest choice gave drafts that pay: a step with them is one anyway."""
        self._drafted_at = -1
        """The step of the newest choice that gave any drafts."""
        self._seen = None if costs is None else SeenCosts(costs)
        self._was_drafted = False
        """The newest step that was timed."""
        self.saved_s = 0.0
        """What plain steps would have taken longer for the same tokens, by what they are known to take; below 0: lost.
        Of steps without prompts."""
        self.n_spans = self.n_verified = 0
        """Spans that verified drafts, and these drafts."""
        self.n_right = [0] * most
        """Of these, the right ones at each place behind the known token."""

    @property
    def most_rows(self) -> int:
        """Of a step with drafts: wider ones were not measured, and may be launched kernel by kernel."""
        return 1 << 30 if self.costs is None else max(self.costs.rows[-1], 1 + self.most)

    def choose(self, seqs: Sequence[Seq], n_rows: int, n_free: int, step: int) -> list[int]:
        """Drafts for each of these, which decode and are not left alone, in a step of `n_rows` rows without them and
        `n_free` to spare."""
        most = min(self.most, n_free)
        if self.costs is None or self._seen is None:
            return [min(most, n_free // len(seqs))] * len(seqs)
        rates = [self._of(seq).rate_beside(self._all.rate) for seq in seqs]
        plain_s, exposed_s = self._beside(self._seen, n_rows, step)
        places = self._places.factors
        lengths = self.costs.choose(rates, most, n_rows, n_free, plain_s + exposed_s, plain_s, places)
        self._is_drafting = any(lengths)
        if not self._is_drafting and step >= self._forgets_from:
            self._again_every = min(2 * self._again_every, MOST_AGAIN)
            self._forgets_from = step + self._again_every
            measured_s = plain_s + self.costs.exposed(n_rows)
            lengths = self.costs.choose(rates, most, n_rows, n_free, measured_s, plain_s, places)
            self._is_drafting = any(lengths)
            if self._is_drafting:
                self._seen.forget(n_rows)
        if self._n_tried < TRIAL and not self._is_drafting and rates[0] >= LEAST_TRIED:
            lengths[0] = most
        n_left = n_free - sum(lengths)
        for i, seq in enumerate(seqs):
            own = self._of(seq)
            if lengths[i]:
                own.n_streak = 0
                continue
            if own.until > step:  # it copies, which does not pay
                seq.drafts_from = own.until
                continue
            if own.n_streak is not None and n_left > 0:  # to see whether it has become better
                lengths[i] = min(most, n_left, 4**own.n_streak)
                n_left -= lengths[i]
            own.n_streak = own.n_streak or 0
            self._leave(seq, step, n_rows, MOST_QUIET)
        if any(lengths):
            self._drafted_at = step
            self._n_tried = min(self._n_tried + 1, TRIAL)
        return lengths

    def watch(self, seq: Seq) -> None:
        """Tokens of a sequence that is left alone became known: it is asked in the next step if it copies now."""
        own = self._of(seq)
        if own.repeats is None:
            own.repeats = Repeats(len(seq.tokens))
        if own.repeats.read(seq.tokens):
            n_right = min(own.repeats.streak, self.most)
            own.count(n_right, n_right)
            own.until, seq.drafts_from = seq.drafts_from, 0

    def takes(self, n_sure: int, n_rows: int, step: int) -> bool:
        """Whether a step of `n_rows` rows should have so many drafts more that are right for sure."""
        if not n_sure:
            return False
        if self.costs is not None and self._seen is not None:
            plain_s, exposed_s = self._beside(self._seen, n_rows, step)
            drafted_s = self.costs.seconds(n_rows + n_sure) + plain_s + exposed_s
            if (n_rows + n_sure) * (self.costs.seconds(n_rows) + plain_s) < LEAST_GAIN * n_rows * drafted_s:
                return False
        self._drafted_at = step
        return True

    def _beside(self, seen: SeenCosts, n_rows: int, step: int) -> tuple[float, float]:
        """What any step takes beside its rows, and what one with drafts does beyond that, more if it is the first."""
        exposed_s = seen.exposed_s(n_rows)
        is_first = exposed_s > 0 and self._drafted_at != step - 1
        return seen.plain_s(n_rows), exposed_s * (BEGINNING if is_first else 1.0)

    def time(self, n_seqs: int, n_drafted: Sequence[int], n_right: int, is_drafted: bool, seconds: float) -> None:
        """A step of `n_seqs` sequences took so long from the end of the one before it; n_drafted: drafts of its spans
        that had any found, n_right: those of all that were right."""
        if self.costs is None or self._seen is None:
            return
        if is_drafted:
            plain_s = self.costs.seconds(n_seqs) + self._seen.plain_s(n_seqs)
            self.saved_s += (1 + n_right / n_seqs) * plain_s - seconds
        is_first, self._was_drafted = is_drafted and not self._was_drafted, is_drafted
        self._seen.time(n_seqs, n_drafted, is_drafted, seconds, BEGINNING if is_first else 1.0)

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
        self._places.count(n_asked, n_right)
        if n_right < max(1, n_verified):
            own.n_streak = 0
        elif own.n_streak is not None:
            own.n_streak = min(own.n_streak + 1, MOST_STREAK)
            if own.n_streak < MOST_STREAK and rate < FIRST_RATE:
                seq.drafts_from = 0  # a right probe of one that is thought to be wrong: a longer one follows at once
        if own.n_vain > 1 and not n_verified:  # nothing is to be found yet: perhaps soon
            self._leave(seq, step, n_rows, 2 ** min(own.n_vain, 8))

    def _leave(self, seq: Seq, step: int, n_rows: int, most: int) -> None:
        """Leave a sequence alone, for `most` steps or until asking all of them is `PROBE_SHARE` of the steps between.

        A step in which one is asked waits for the step before it, and the next one for that, unless there are drafts in
        it anyway. So periods are powers of two and end together: such a step asks all that are due.
        """
        assert self.costs is not None and self._seen is not None
        rows_s = self.costs.seconds(n_rows)
        asking_s = self.costs.guesses_s([1] * n_rows) + self.costs.seconds(2 * n_rows) - rows_s
        if not self._is_drafting:
            asking_s += 2 * max(0.0, self._seen.exposed_s(n_rows))
        n_steps = min(MOST_QUIET, most, math.ceil(asking_s / (PROBE_SHARE * (rows_s + self._seen.plain_s(n_rows)))))
        period = 1 << max(0, n_steps - 1).bit_length()
        seq.drafts_from = (step // period + 1) * period

    def _of(self, seq: Seq) -> Acceptance:
        if seq.acceptance is None:
            seq.acceptance = Acceptance(self._all.rate, 1.0)
        return seq.acceptance
