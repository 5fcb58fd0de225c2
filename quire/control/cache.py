"""Pool and prefix tree as one thing: the pages that a sequence can take, find and leave behind.

Owns the page side of a sequence (pages, node, room, n_tree_pages). Does not decide who gets pages.
Invariants: a page is available when it is free or cached without a holder; a request for more than that is refused
before anything changes.
"""

from __future__ import annotations

from quire.control.config import SchedulerConfig
from quire.control.node import Match
from quire.control.pages import PageError, PagePool
from quire.control.seq import Seq
from quire.control.tree import PrefixTree

NO_MATCH = Match(None, 0, [], 0)


class PageCache:
    """The KV pages of one engine, counted."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.enabled = config.enable_prefix_caching
        self.pool = PagePool(config.n_pages)
        self.tree = PrefixTree(self.pool, config.page_size)

    @property
    def n_available(self) -> int:
        """Pages that can be taken now: free, or in the tree with no holder."""
        return self.pool.n_free + self.tree.n_unlocked

    def take(self, n: int) -> list[int]:
        """`n` fresh pages, evicting as needed; PageError, and no change, if fewer are available."""
        lacking = n - self.pool.n_free
        if lacking > self.tree.n_unlocked:
            raise PageError(f"{n} pages wanted, {self.n_available} are available: check before taking")
        if lacking > 0:
            self.tree.evict(lacking)
        return self.pool.take(n)

    def forget(self) -> bool:
        """Free every page of the tree that has no holder; True if the tree is empty then."""
        self.tree.evict(self.tree.n_unlocked)
        return not self.tree.n_pages

    def grow(self, seq: Seq, n: int) -> list[int]:
        """`n` fresh pages at the end of a sequence's table."""
        pages = self.take(n)
        seq.pages += pages
        seq.room += n * self.page_size
        return pages

    def match(self, seq: Seq) -> Match:
        """The cached prefix of a waiting sequence, at least one token short of all: that one's logits are needed."""
        if not self.enabled:
            return NO_MATCH
        return self.tree.match(seq.request.cache_salt, seq.tokens, len(seq.tokens) - 1)

    def hold(self, seq: Seq, found: Match) -> list[int]:
        """Lock a match for `seq` and share its pages; returns them. The sequence takes them over by `Seq.enter`."""
        node = self.tree.lock(found)
        self.pool.share(found.pages)
        seq.node, seq.n_tree_pages = node, len(found.pages)
        return list(found.pages)

    def fork(self, seq: Seq, source: Seq, n: int) -> list[int]:
        """Share the first `n` pages of a running sibling, and lock those that are in the tree; returns them."""
        pages = source.pages[:n]
        self.pool.share(pages)
        n_tree_pages = min(n, source.n_tree_pages)
        found = self.tree.match(seq.request.cache_salt, seq.tokens, n_tree_pages * self.page_size)
        seq.node, seq.n_tree_pages = self.tree.lock(found), len(found.pages)
        return pages

    def publish(self, seq: Seq, *, leaving: bool = False) -> None:
        """Enter the pages that are full of planned tokens known to the host, and that `seq` alone holds, into the tree.

        While the sequence stays, only as long as nobody else has entered the same tokens: it must not lock a page
        that it does not use, or the last sequence of a full pool could not go on.
        """
        n_full, first = min(seq.planned, len(seq.tokens)) // self.page_size, seq.n_tree_pages
        if not self.enabled or n_full <= first:
            return
        refs, end = self.pool.refs, first
        while end < n_full and refs[seq.pages[end]] == 1:  # a fork that shares it would hold it without a lock
            end += 1
        salt, pages = seq.request.cache_salt, seq.pages[:end]
        seq.node, seq.n_tree_pages = self.tree.extend(salt, seq.node, first, seq.tokens, pages, through=leaving)

    def release(self, seq: Seq, *, keep: bool) -> None:
        """Give back everything a sequence holds; `keep` leaves its full pages in the tree."""
        if keep:
            self.publish(seq, leaving=True)
        if seq.node is not None:
            self.tree.unlock(seq.node)
        self.pool.drop(reversed(seq.pages))
