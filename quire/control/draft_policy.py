"""How many drafts each sequence's next span verifies: by what became of its drafts so far, and what a row costs.

Owns the estimates and when a sequence is asked again. Does not own the trade (`planner/drafts.py`), nor room for drafts
(`drafting.py`).
Invariant: where drafts do not pay, they take at most about `PROBE_SHARE` of the time: such a sequence takes part in so
few steps with drafts that these are no longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quire.control.acceptance import Acceptance
from quire.control.seq import Seq
from quire.planner.drafts import DraftCosts

FIRST_RATE: Final = 0.7
"""The chance of a draft before anything is known."""
PROBE_SHARE: Final = 0.01
MOST_QUIET: Final = 256
"""Tokens after which a sequence is asked again at the latest."""


class DraftPolicy:
    """See the module. costs: None gives every sequence as many as it may have."""

    def __init__(self, most: int, costs: DraftCosts | None) -> None:
        self.most, self.costs = most, costs
        self._all = Acceptance(FIRST_RATE, 1.0)
        """Of all sequences: what a new one begins with."""
        self.n_spans = self.n_verified = 0
        """Spans that verified drafts, and these drafts."""
        self.n_right = [0] * most
        """Of these, the right ones at each place behind the known token."""

    def choose(self, seqs: Sequence[Seq], n_rows: int, n_free: int) -> list[int]:
        """Drafts for each of these, which decode, in a step of `n_rows` rows without them and `n_free` to spare."""
        most = min(self.most, n_free)
        if most <= 0:
            return [0] * len(seqs)
        if self.costs is None:
            return [min(most, n_free // len(seqs))] * len(seqs)
        rates = [self._of(seq).rate if self._of(seq).quiet_until <= len(seq.tokens) else 0.0 for seq in seqs]
        if not any(rates):
            return [0] * len(seqs)
        lengths = self.costs.choose(rates, most, n_rows, n_free)
        for i, (seq, rate) in enumerate(zip(seqs, rates, strict=True)):
            if rate and not lengths[i] and sum(lengths) < n_free:
                lengths[i] = 1  # to see whether it has become better
                self._hush(seq, n_rows, MOST_QUIET)
        return lengths

    def count(self, seq: Seq, n_verified: int, n_right: int, n_rows: int) -> None:
        """A step of `n_rows` sequences verified drafts of this one, or had asked for some in vain."""
        if n_verified:
            self.n_spans += 1
            self.n_verified += n_verified
            for place in range(n_right):
                self.n_right[place] += 1
        if self.costs is None:
            return
        own = self._of(seq)
        if n_verified:
            own.count(n_verified, n_right)
            self._all.count(n_verified, n_right)
        else:
            own.n_vain += 1
        if own.n_vain > 1:
            self._hush(seq, n_rows, 2 ** min(own.n_vain, 8))

    def _hush(self, seq: Seq, n_rows: int, most: int) -> None:
        """Leave a sequence alone, for `most` tokens or until asking all of them is `PROBE_SHARE` of the steps between.

        Sequences are asked at different steps, and each such step waits for the one before it.
        """
        assert self.costs is not None
        plain_s = self.costs.seconds(n_rows)
        asking_s = self.costs.exposed_s + self.costs.guess_s + self.costs.seconds(n_rows + 1) - plain_s
        n_steps = math.ceil(n_rows * asking_s / (PROBE_SHARE * plain_s))
        self._of(seq).quiet_until = len(seq.tokens) + min(MOST_QUIET, n_steps, most)

    def _of(self, seq: Seq) -> Acceptance:
        if seq.acceptance is None:
            seq.acceptance = Acceptance(2 * self._all.rate, 2.0)
        return seq.acceptance
