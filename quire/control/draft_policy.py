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

from quire.control.acceptance import FIRST_DRAFTS, LEAST_TRIED, LONG_MEMORY, Acceptance, Places
from quire.control.copy_watch import CopyWatch
from quire.control.repeats import Repeats
from quire.control.seen_costs import SeenCosts, StepKind
from quire.control.seq import Seq
from quire.planner.drafts import LEAST_GAIN, DraftCosts, least_gain

FIRST_RATE: Final = 0.7
"""The chance of a draft before anything is known."""
MOST_PROMISED: Final = 8
"""As how many right drafts the longest copy counts that was noticed."""
PROBE_SHARE: Final = 0.01
MOST_PROBED: Final = 8
"""Sequences in a step that are asked for a draft though it is thought to be wrong: these tell of all."""
MOST_STREAK: Final = 3
"""Right probes in a row, each longer than the one before, after which a sequence for which drafts still do not pay is
left alone."""
BEGINNING: Final = 1.25
"""Times what is exposed, of the first of a run of steps with drafts: the step behind the run waits, too."""
MOST_QUIET: Final = 1024
"""Steps after which a sequence is asked again at the latest."""
MOST_WAIT: Final = 16
"""The same of one whose drafts are right often enough for a trial, which begins when there is credit for it."""
KNOWN_DRAFTS: Final = 4.0
"""Of a sequence that were verified, or that its copy promises, from which a trial has drafts of it, too."""
LITTLE_READ: Final = 0.1
"""Of a plain step: what the drafter may read of each of these."""
TRIAL: Final = 12
"""Steps with drafts in a row, of few sequences, that tell what such steps really take where they are thought not to
pay: lone ones read all that the drafter has not seen, and wait longer than those of a run."""
FIRST_PLAIN: Final = 2.0
"""Times what the start measured, of a step without drafts before any was seen: in its place it is colder."""
MOST_LOST: Final = 3.0
"""Times the same, at once: what a step loses beyond that is an accident."""
MOST_CREDIT: Final = 4
"""Trials that may be lost one after another: as many steps as all of them have, without a token more."""
PLAIN_EVERY: Final = 512
PLAIN_TRIAL: Final = 3
"""The same for steps without drafts: so many of them behind so many with drafts in a row."""
STEPS_NEAR: Final = 16
TIME_EVERY: Final = 32
"""Timing takes tens of microseconds, which small models feel where nothing is drafted."""
STEPS_BACK: Final = 8
"""Of which is known how they were chosen, until they are timed."""


class DraftPolicy:
    """See the module. costs: None gives every sequence as many as it may have. copies: drafts are what stood before,
    so that a text which repeats itself promises some."""

    def __init__(self, most: int, costs: DraftCosts | None, *, copies: bool = False) -> None:
        self.most, self.costs = most, costs
        self._seen = None if costs is None else SeenCosts(costs)
        self.copies = CopyWatch(self._seen) if copies and most > 0 and self._seen is not None else None
        """Says when sequences that are left alone are to be shown to `watch`; None: never."""
        self.none_before = 0
        """The step before which all that run are left alone; 0: not known."""
        self._n_asked = 0
        """Choices that were made."""
        self._n_to_try = 0
        """Steps that the trial has still to come, if there is one."""
        self._tried_read_s = 0.0
        """What its drafter has read for, which does not end it."""
        self._credit_s = 0.0 if costs is None else TRIAL * FIRST_PLAIN * costs.step_s[0]
        """What trials may lose: one trial, `PROBE_SHARE` of the time, and what drafts have gained. Below 0 there is no
        trial."""
        self._beginnings: dict[int, float] = {}
        """The newest steps in which a sequence has drafts and had none in the step before: seconds in which the drafter
        reads what it has missed."""
        self._plain_at = 0
        """The newest step without drafts, as far as any were chosen."""
        self._all = Acceptance(FIRST_RATE * FIRST_DRAFTS, FIRST_DRAFTS)
        """Of all sequences: what a new one begins with."""
        self._places = Places(most)
        self._is_drafting = False
        """Whether the newest choice gave drafts that pay: a step with them is one anyway."""
        self._drafted_at = -1
        """The step of the newest choice that gave any drafts."""
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
        n_drafting = step - self._plain_at
        if n_drafting >= PLAIN_EVERY and self._drafted_at >= step - PLAIN_TRIAL:
            if n_drafting >= PLAIN_EVERY + PLAIN_TRIAL - 1:
                self._plain_at = step
            return [0] * len(seqs)
        if not self._is_drafting:
            tried, least = self._tried_together(seqs, rates, n_rows)
            if self._tries(max(tried), n_rows, self._reading_s(seqs[0], self._of(seqs[0])) if tried[0] else 0.0):
                if least:
                    plain_s, exposed_s = self._beside(self._seen, n_rows, step)
                lengths = self.costs.choose(tried, most, n_rows, n_free, plain_s + exposed_s, plain_s, places, least)
            if not any(lengths):
                self._plain_at = step
        self._ask(seqs, lengths, rates, n_rows, n_free - sum(lengths), step)
        return lengths

    def _tried_together(self, seqs: Sequence[Seq], rates: Sequence[float], n_rows: int) -> tuple[list[float], float]:
        """The chance of each sequence's drafts in a trial, 0 if it has none, and times which gain they must promise.

        The first is in it, whatever it promises, and others whose drafts are known to be right and of whom there is
        little to read: all of them share what is exposed. Then a few drafts in a step of many sequences are known to
        take longer than they bring.
        """
        assert self.costs is not None
        little_s, found, are_known = LITTLE_READ * self.costs.seconds(n_rows), list[float](), n_rows > 1
        for seq, rate in zip(seqs, rates, strict=True):
            own = self._of(seq)
            is_known = own.n_verified >= KNOWN_DRAFTS and self._reading_s(seq, own) <= little_s
            found.append(rate if rate >= LEAST_TRIED and (is_known or not found) else 0.0)
            are_known = are_known and (is_known or not found[-1])
        return found, 1 / least_gain(n_rows) if are_known else 0.0

    def _tries(self, rate: float, n_rows: int, reading_s: float) -> bool:
        """Whether a step whose drafts do not pay, by what is known, is one of a trial, which may be its first. Then the
        drafter reads for so long."""
        assert self._seen is not None
        if rate < LEAST_TRIED:
            self._n_to_try = 0
        elif (
            not self._n_to_try and self._affords(reading_s, n_rows) and (self._seen.knows_plain or self._drafted_at < 0)
        ):
            self._n_to_try, self._tried_read_s = TRIAL, 0.0
            self._seen.forget(n_rows)
        if not self._n_to_try:
            return False
        self._n_to_try -= 1
        return True

    def _ask(
        self, seqs: Sequence[Seq], lengths: list[int], rates: list[float], n_rows: int, n_left: int, step: int
    ) -> None:
        """Leave sequences without drafts alone, or give those whose drafts were wrong some to see whether they have
        become better; note who has drafts. n_left: drafts that the step may have beyond these."""
        n_probed, n, alone = 0, len(seqs), list[tuple[Seq, bool]]()
        fixed_s, reading_s = self._asking_s(n_rows), 0.0
        self._n_asked += 1
        if self.copies is not None:
            self.copies.forget()
        for place in range(n):
            i = (place + MOST_PROBED * self._n_asked) % n  # others are probed the next time
            seq, own = seqs[i], self._of(seqs[i])
            if lengths[i]:
                own.n_streak = 0
            elif own.until > step and self._credit_s < 0:  # it copies, which does not pay
                seq.drafts_from = own.until
            else:
                is_due, read_s = own.n_streak is not None and rates[i] < LEAST_TRIED, self._reading_s(seq, own)
                pays = reading_s + read_s <= fixed_s if n_probed else self._affords(fixed_s + read_s, n_rows)
                if is_due and pays and n_left > 0 and n_probed < MOST_PROBED:
                    lengths[i] = min(self.most, n_left, 4 ** (own.n_streak or 0))
                    n_left, n_probed, reading_s = n_left - lengths[i], n_probed + 1, reading_s + read_s
                own.n_streak = own.n_streak or 0
                alone.append((seq, rates[i] < LEAST_TRIED))
        if alone:
            next_s = fixed_s + max(reading_s, self._reading_s(alone[0][0], self._of(alone[0][0])))
            waits = [self._period(next_s, n_rows, most) for most in (MOST_WAIT, MOST_QUIET)]
            for seq, is_wrong in alone:
                seq.drafts_from = (step // waits[is_wrong] + 1) * waits[is_wrong]
        self._note(seqs, lengths, step)

    def _note(self, seqs: Sequence[Seq], lengths: Sequence[int], step: int) -> None:
        """Which sequences have drafts in this step."""
        begins, reading_s = False, 0.0
        for seq, length in zip(seqs, lengths, strict=True):
            if length:
                own = self._of(seq)
                if own.drafted_at != step - 1:
                    begins, reading_s = True, reading_s + self._reading_s(seq, own)
                own.drafted_at = self._drafted_at = step
                own.n_read = seq.planned
        if begins:
            self._begin(step, reading_s)

    def _begin(self, step: int, reading_s: float) -> None:
        self._beginnings[step] = reading_s
        if len(self._beginnings) > STEPS_BACK:
            del self._beginnings[next(iter(self._beginnings))]

    def watch(self, seqs: Sequence[Seq], step: int) -> None:
        """Have some of the texts read that are left alone: one that copies now is asked in this step."""
        assert self.copies is not None
        for seq in self.copies.turn(seqs, step):
            if seq.drafts_from > step and seq.can_draft and seq.n_outputs > 0:
                own = self._of(seq)
                if own.repeats is None:
                    own.repeats = Repeats(len(seq.tokens))
                if self.copies.read(seq, own.repeats, step):
                    own.promise(self.copies.rate, min(own.repeats.streak, MOST_PROMISED))
                    own.until, seq.drafts_from, self.none_before = seq.drafts_from, 0, 0

    def takes(self, n_sure: int, n_rows: int, step: int) -> bool:
        """Whether a step of `n_rows` rows should have so many drafts more that are right for sure."""
        if not n_sure:
            return False
        if self.costs is not None and self._seen is not None:
            plain_s, exposed_s = self._beside(self._seen, n_rows, step)
            drafted_s = self.costs.seconds(n_rows + n_sure) + plain_s + exposed_s
            if (n_rows + n_sure) * (self.costs.seconds(n_rows) + plain_s) < LEAST_GAIN * n_rows * drafted_s:
                return False
        if self._drafted_at != step - 1:
            self._begin(step, 0.0)
        self._drafted_at = step
        return True

    def _beside(self, seen: SeenCosts, n_rows: int, step: int) -> tuple[float, float]:
        """What any step takes beside its rows, and what one with drafts does beyond that, more if it is the first."""
        exposed_s = seen.exposed_s(n_rows)
        is_first = exposed_s > 0 and self._drafted_at != step - 1
        return seen.plain_s(n_rows), exposed_s * (BEGINNING if is_first else 1.0)

    def times(self, step: int) -> bool:
        """Whether this step is to be timed: all near those with drafts, one of `TIME_EVERY` far behind them."""
        return step < self._drafted_at + STEPS_NEAR or not step % TIME_EVERY

    def time(
        self, step: int, n_seqs: int, n_drafted: Sequence[int], n_right: int, seconds: float, kind: StepKind
    ) -> None:
        """A step of `n_seqs` sequences took so long from the end of the one before it; n_drafted: drafts of its spans
        that had any found, n_right: those of all that were right."""
        if self.costs is None or self._seen is None:
            return
        plain_s = self._seen.plain_step_s(n_seqs)
        n_steps = 1 if step < self._drafted_at + STEPS_NEAR else TIME_EVERY
        gained_s, reading_s = PROBE_SHARE * min(seconds, MOST_LOST * plain_s) * n_steps, 0.0
        if kind is StepKind.DRAFTED and step in self._beginnings:
            kind, reading_s = StepKind.BEGINNING, self._beginnings[step]
        most_lost_s = MOST_LOST * plain_s + reading_s
        if kind is not StepKind.PLAIN:
            n_new, apart = 1 + n_right / n_seqs, least_gain(n_seqs) / least_gain(1)
            self.saved_s += n_new * plain_s - seconds
            if self._seen.knows_plain:
                gained_s += max(n_new * plain_s - apart * seconds, -most_lost_s)
            else:
                gained_s += min(max(n_new * FIRST_PLAIN * plain_s - seconds, -most_lost_s), 0.0)
        trial_s = TRIAL * plain_s
        least_s = min(self._credit_s, -trial_s - reading_s)
        self._credit_s = min(max(self._credit_s + gained_s, least_s), MOST_CREDIT * trial_s)
        self._tried_read_s += reading_s
        if self._credit_s + self._tried_read_s <= -trial_s:
            self._n_to_try = 0
        self._seen.time(n_seqs, n_drafted, seconds - reading_s, kind)

    def count(
        self, seq: Seq, step: int, n_asked: int, n_verified: int, n_right: int, n_rows: int, *, is_sure: bool = False
    ) -> None:
        """A step of `n_rows` sequences had asked for so many drafts of this one, and verified those that were found.
        is_sure: they were foretold, which says nothing of guesses."""
        if n_verified:
            self.n_spans += 1
            self.n_verified += n_verified
            seq.n_draft_spans += 1
            seq.n_drafts += n_verified
            for place in range(n_right):
                self.n_right[place] += 1
        if self.costs is None or is_sure:
            return
        own, rate, self.none_before = self._of(seq), self._of(seq).rate_beside(self._all.rate), 0
        if own.is_promised and self.copies is not None:
            own.is_promised = False
            self.copies.count(n_asked, n_right)
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
            period = self._period(self._asking_s(n_rows), n_rows, 2 ** min(own.n_vain, 8))
            seq.drafts_from = (step // period + 1) * period
            if self.copies is not None:
                self.copies.from_step = 0

    def _reading_s(self, seq: Seq, own: Acceptance) -> float:
        """Of what the drafter has missed of a sequence."""
        assert self.costs is not None
        return self.costs.read_s * max(0, seq.planned - own.n_read)

    def _asking_s(self, n_rows: int) -> float:
        """Of asking, besides that. A step in which a sequence is asked waits for the step before it, and the next one
        for that, unless there are drafts in it anyway."""
        assert self.costs is not None and self._seen is not None
        n_asked = min(n_rows, MOST_PROBED)
        asking_s = self.costs.guesses_s([1] * n_asked) + self.costs.seconds(n_rows + n_asked)
        if not self._is_drafting:
            asking_s += self._seen.beginning_s(n_rows) + self._seen.behind_s(n_rows)
        return asking_s - self.costs.seconds(n_rows)

    def _affords(self, seconds: float, n_rows: int) -> bool:
        """Whether asking may take so long; what takes longer than two trials waits for as much credit as these."""
        assert self.costs is not None
        return self._credit_s >= min(seconds, 2 * TRIAL * self.costs.seconds(n_rows))

    def _period(self, asking_s: float, n_rows: int, most: int) -> int:
        """Steps for which sequences are left alone: `most`, or until asking is `PROBE_SHARE` of the time. They are
        powers of two and end together: such a step asks all that are due."""
        assert self.costs is not None and self._seen is not None
        plain_s = self._seen.plain_step_s(n_rows)
        n_steps = min(MOST_QUIET, most, math.ceil(asking_s / (PROBE_SHARE * plain_s)))
        return 1 << max(0, n_steps - 1).bit_length()

    def _of(self, seq: Seq) -> Acceptance:
        if seq.acceptance is None:
            seq.acceptance = Acceptance(self._all.rate, 1.0)
        return seq.acceptance
