"""Which texts that are left alone are read to see whether they copy, when, and whether that is to be trusted.

Owns the turns of texts, and what became of drafts behind copies that were noticed. Does not own how a copy is seen
(`repeats.py`) nor what follows from one (`draft_policy.py`).
Invariant: reading takes about `SHARE` of the time, `TRUSTED_SHARE` where it has helped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quire.control.acceptance import FIRST_DRAFTS, LEAST_TRIED, LONG_MEMORY, Acceptance
from quire.control.repeats import STREAK, Repeats
from quire.control.seen_costs import SeenCosts
from quire.control.seq import Seq

FIRST_TRUST: Final = 0.9
"""The chance of the draft behind a copy, before any was verified."""
HEARD_EVERY: Final = 32
"""Copies of which one is asked for though those before it had wrong drafts."""
READ_S: Final = 8e-6
"""Of one text, of which nothing is in a cache, as some steps have gone by."""
SHARE: Final = 0.0025
TRUSTED_SHARE: Final = 0.01
"""Of the time, for that; the second for as long as drafts behind copies were right within `FRESH` texts read."""
FRESH: Final = 1024
FEW: Final = 4
"""Up to so many texts are read as soon as they can copy, where that has helped or nothing is known: each step sooner is
a step of drafts. More are read in turns, each once in so many steps at most. Where it has helped little, it is done as
many times more seldom."""


class CopyWatch:
    """See the module. seen: what steps take."""

    def __init__(self, seen: SeenCosts) -> None:
        self._seen = seen
        self.from_step = 0
        """No text has to be read before this step."""
        self._behind = Acceptance(FIRST_TRUST * FIRST_DRAFTS, FIRST_DRAFTS)
        """What became of drafts behind copies that were noticed."""
        self._n_unheard = 0
        """Copies that were noticed since the last one that was not trusted and yet asked for."""
        self._n_fresh = 0
        """Texts that may be read until it is forgotten that a copy has helped."""
        self._every: dict[int, int] = {}
        """Number of texts → steps in which each is read once, by what was known at the newest `forget`."""

    @property
    def trusts(self) -> bool:
        """Whether drafts behind a copy are right often enough to ask for them."""
        return self._behind.rate >= LEAST_TRIED

    @property
    def rate(self) -> float:
        """The chance of such a draft."""
        return self._behind.rate

    def count(self, n_asked: int, n_right: int) -> None:
        """Of the drafts behind a copy, of which a step was to verify so many, the first `n_right` were right."""
        self._behind.count(n_asked, n_right, LONG_MEMORY)
        self._n_fresh = FRESH if n_right else self._n_fresh
        self._every.clear()

    def forget(self) -> None:
        """Steps may take another time by now, and others be left alone."""
        self._every.clear()
        self.from_step = 0

    def every(self, n_texts: int) -> int:
        """Steps in which each of so many texts is to be read once; 1: as soon as it can copy."""
        if n_texts <= FEW and self.trusts:
            return 1
        if n_texts not in self._every:
            share = TRUSTED_SHARE if self._n_fresh > 0 and self.trusts else SHARE
            step_s = self._seen.plain_step_s(n_texts)
            self._every[n_texts] = max(FEW, math.ceil(n_texts * READ_S / (share * step_s)))
        return self._every[n_texts] if self.trusts else self._every[n_texts] * FEW

    def turn(self, seqs: Sequence[Seq], step: int) -> Sequence[Seq]:
        """Those of a step's sequences whose texts are to be read in it, if they are left alone."""
        every = self.every(len(seqs))
        place = step % every
        if every == 1:
            self.from_step = step + STREAK  # until `read` says how soon one may copy
        elif place + 1 < len(seqs):
            self.from_step = step + 1
        else:
            self.from_step = step - place + every
        return seqs[place::every]

    def read(self, seq: Seq, repeats: Repeats, step: int) -> bool:
        """Whether this text, tokens of which became known, copies now and is to be asked for drafts."""
        copies = repeats.read(seq.tokens)
        self.from_step = min(self.from_step, step + repeats.n_ahead)
        if self._n_fresh:
            self._n_fresh -= 1
            if not self._n_fresh:
                self._every.clear()
        return copies and (self.trusts or self._is_heard())

    def _is_heard(self) -> bool:
        """One of `HEARD_EVERY` copies that are not trusted is asked for all the same."""
        self._n_unheard = (self._n_unheard + 1) % HEARD_EVERY
        return not self._n_unheard
