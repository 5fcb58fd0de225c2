"""The page pool: which page ids are free, and how many owners each taken page has.

An owner is a sequence's page table or the prefix tree; each counts once. Does not know what a page holds.
Invariants: a page is in the free list, once, exactly when it has no owner; page 0 (the dummy that padding writes to)
is never handed out, shared or dropped; a refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.errors import EngineError
from quire.core.failure import Code


class PageError(EngineError):
    """A page was used against the rules of the pool: a bug in control, never a user's fault."""

    code = Code.PAGE_ACCOUNTING


class PagePool:
    """Page ids 1 .. n_pages-1 with reference counts and a free list (last freed, first taken)."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.refs = [0] * n_pages
        """Owners of each page."""
        self._free = list(range(n_pages - 1, 0, -1))

    @property
    def n_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` free pages, each with one owner now; PageError, and no change, if there are fewer."""
        if n > len(self._free):
            raise PageError(f"{n} pages wanted, {len(self._free)} are free: check before taking")
        if n <= 0:
            return []
        taken = self._free[: -n - 1 : -1]
        del self._free[-n:]
        for page in taken:
            self.refs[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each page; PageError if one of them is free."""
        refs = self.refs
        for page in pages:
            if refs[page] <= 0:
                raise PageError(f"page {page} is free and cannot be shared")
            refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One owner less for each page; a page without an owner is free. PageError on a free page or page 0."""
        refs = self.refs
        for page in pages:
            count = refs[page]
            if count <= 0:
                raise PageError(f"page {page} is free already (or is the dummy page) and cannot be freed")
            refs[page] = count - 1
            if count == 1:
                self._free.append(page)
