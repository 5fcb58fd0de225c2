"""Pages of groups with a window that the prefix tree has: where each is, and which of them may go on their own.

A page behind the window of the sequence that computed it is of use only to a prompt that ends its match nearby. So such
pages are evicted one by one, in order of last use, while what keeps everything stays.
Owns that order and the place of each page. Does not own references (`pages.py`) nor nodes (`tree.py`).
Invariant: a page is unreferenced exactly when it has a place in the tree and no owner but the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.control.node import Node
from quire.control.pages import PageError, PagePool


class WindowPages:
    """See the module."""

    def __init__(self, pool: PagePool) -> None:
        self.places: dict[int, tuple[Node, int]] = {}
        """Page → its node, and the group in whose table of the node it is."""
        self.unreferenced: OrderedDict[int, int] = OrderedDict()
        """Page → tick of its last use, the oldest first."""
        self._pool = pool

    def enter(self, pages: Iterable[int], node: Node, group: int) -> int:
        """The tree becomes an owner of these pages of sequences, of which zeros do not count; returns how many."""
        places, n = self.places, 0
        for page in pages:
            if page:
                if page in places:
                    raise PageError(f"page {page} is twice in the prefix tree")
                self._pool.share((page,))
                places[page] = (node, group)
                n += 1
        return n

    def move(self, pages: Iterable[int], node: Node, group: int) -> None:
        """Pages of the tree, or zeros, are now in `node`."""
        for page in pages:
            if page:
                self.places[page] = (node, group)

    def leave(self, pages: Iterable[int]) -> tuple[int, int]:
        """The tree is no owner any more; returns how many pages (zeros do not count), and how many are free by that."""
        n = n_free = 0
        for page in pages:
            if page:
                del self.places[page]
                n += 1
                n_free += self.unreferenced.pop(page, None) is not None
                self._pool.drop((page,))
        return n, n_free

    def hold(self, pages: Iterable[int]) -> None:
        """A sequence becomes an owner of these pages, in the tree or not."""
        unreferenced = self.unreferenced
        for page in pages:
            self._pool.share((page,))
            unreferenced.pop(page, None)

    def drop(self, pages: Iterable[int], tick: int) -> None:
        """A sequence is no owner of these pages any more, zeros left out."""
        refs, places, unreferenced = self._pool.refs, self.places, self.unreferenced
        for page in pages:
            if page:
                self._pool.drop((page,))
                if refs[page] == 1 and page in places:
                    unreferenced[page] = tick

    def n_unreferenced(self, pages: Iterable[int]) -> int:
        """How many of these are unreferenced."""
        unreferenced = self.unreferenced
        return sum([page in unreferenced for page in pages])

    @property
    def oldest(self) -> tuple[int, int] | None:
        """(tick, page) of the unreferenced page that was used longest ago."""
        for page, tick in self.unreferenced.items():
            return tick, page
        return None
