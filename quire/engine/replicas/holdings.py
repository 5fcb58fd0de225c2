"""What one replica has in its prefix trees, as far as whoever chooses knows: what it has said, and what is on its way.

Owns both sets of digests (`control/digests.py`) and the numbers of updates. Does not own who is asked, nor the choice.
Until a replica has said what it holds, what was sent there counts, used last; afterwards what was sent counts until its
request has ended and an update has come that was made later: by then its pages are said, or were not kept.
Invariant: neither set has more digests than the replica has pages.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from quire.control.digests import cut_up
from quire.core.events import PrefixUpdate


class Holdings:
    """See the module. n_pages: of the replica."""

    def __init__(self, n_pages: int) -> None:
        self.is_known = False
        """It says what it holds, and none of its updates was lost since it began to."""
        self._n_pages = n_pages
        self._held: set[bytes] = set()
        self._sent: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        """Digest → its requests, those used last behind."""
        self._ended: list[Sequence[bytes]] = []
        """Of requests that have ended since the last complete update."""
        self._number = 0
        """Of the next update."""
        self._is_settled = False
        """It has said all: what is on its way is of requests that are open, or in `_ended`."""

    @property
    def n_held(self) -> int:
        """Pages that it has said it holds."""
        return len(self._held)

    @property
    def n_sent(self) -> int:
        """Pages on their way."""
        return len(self._sent.keys() - self._held)

    def n_known(self, digests: Sequence[bytes]) -> int:
        """How many of these pages, from the first on."""
        held, sent = self._held, self._sent
        for number, digest in enumerate(digests):
            if digest not in held and digest not in sent:
                return number
        return len(digests)

    def expect(self, digests: Iterable[bytes]) -> None:
        """A request was sent there."""
        sent = self._sent
        for digest in digests:
            sent[digest] = sent.pop(digest, 0) + 1
        while len(sent) > self._n_pages:
            sent.popitem(last=False)

    def end(self, digests: Sequence[bytes]) -> None:
        """It has ended, or went elsewhere."""
        if self._is_settled:
            self._ended.append(digests)

    def hear(self, update: PrefixUpdate, still_open: Iterable[Sequence[bytes]]) -> None:
        """Take in what it says; a gap makes it unknown until it begins anew. still_open: digests of the requests that
        it has now."""
        if update.number == 0:
            self._held.clear()
            self._ended.clear()
            self.is_known, self._is_settled, self._number = True, False, 0
        elif not self.is_known or update.number != self._number:
            self.is_known = self._is_settled = False
            self._ended.clear()
            return
        self._number += 1
        self._held.difference_update(cut_up(update.removed))
        room = max(0, self._n_pages - len(self._held))
        self._held.update(cut_up(update.added)[:room])
        if not update.n_left:
            self._settle(still_open)

    def _settle(self, still_open: Iterable[Sequence[bytes]]) -> None:
        """All is said: what had ended before is on its way no more."""
        if not self._is_settled:
            self._is_settled = True
            self._sent.clear()
            for digests in still_open:
                self.expect(digests)
        sent = self._sent
        for digests in self._ended:
            for digest in digests:
                n_left = sent.get(digest, 0) - 1
                if n_left > 0:
                    sent[digest] = n_left
                else:
                    sent.pop(digest, None)
        self._ended.clear()
