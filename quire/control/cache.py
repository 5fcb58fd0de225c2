"""Pool and prefix tree as one thing: the pages that a sequence can take, find and leave behind.

Owns the page side of a sequence (tables, held_from, room, node, n_tree_pages). Does not decide who gets pages.
Invariants: a page is available when it is free or cached without a holder; a request for more than that is refused
before anything changes; all groups of layers have tables of one length; a page behind its group's window, as seen from
the last page border that is computed, is held by no sequence. (From that border a prefix hit would go on.)
"""

from __future__ import annotations

from quire.config.kv import first_page
from quire.control.config import SchedulerConfig
from quire.control.node import Match
from quire.control.pages import PageError, PagePool
from quire.control.seq import NEVER, Seq
from quire.control.snapshots import Snapshots
from quire.control.tree import PrefixTree
from quire.core.request import MAX_SALT_CHARS, Request

_RUN = MAX_SALT_CHARS + 1
"""Characters between a request's own salt and what stands behind it: longer than any salt that a request can bring."""
NO_MATCH = Match(None, 0, [], 0)


class PageCache:
    """The KV pages of one engine, counted."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.page_size = config.page_size
        self.enabled = config.enable_prefix_caching and (not config.has_states or config.n_snapshots > 0)
        self.windows = config.kv.windows
        self.n_groups, self.n_full = len(self.windows), config.kv.n_full
        self.has_windows = self.n_full < self.n_groups
        """Some pages are given back while their sequence runs."""
        self.pool = PagePool(config.n_pages)
        self.snapshots = Snapshots(config.n_snapshots, config.page_size) if config.has_states else None
        self.tree = PrefixTree(self.pool, config.page_size, self.windows, self.snapshots)
        self._config = config

    @property
    def n_available(self) -> int:
        """Pages that can be taken now: free, or in the tree with no holder."""
        return self.pool.n_free + self.tree.n_evictable

    def has(self, n: int) -> bool:
        """Whether so many are available."""
        return n <= self.pool.n_free or n <= self.n_available

    def take(self, n: int) -> list[int]:
        """`n` fresh pages, evicting as needed; PageError, and no change, if fewer are available."""
        lacking = n - self.pool.n_free
        if lacking > 0:
            if lacking > self.tree.n_evictable:
                raise PageError(f"{n} pages wanted, {self.n_available} are available: check before taking")
            self.tree.evict(lacking)
        return self.pool.take(n)

    def forget(self) -> bool:
        """Free every page of the tree that has no holder; True if the tree is empty then."""
        self.tree.evict(self.tree.n_evictable)
        return not self.tree.n_pages

    # ---- counting ------------------------------------------------------------------------------------------------

    def needed(self, n_tokens: int, tables: list[list[int]], held_from: list[int]) -> int:
        """Pages that whoever has these tables must still take to come to `n_tokens` tokens, at least."""
        needs = self._config.pages_of(n_tokens)
        return sum([
            max(0, need - len(table) + first) for need, table, first in zip(needs, tables, held_from, strict=True)
        ])  # fmt: skip

    def starts(self, n_tokens: int) -> list[int]:
        """The first page, in each group, that is seen from the last page border at or before token `n_tokens`."""
        return [self._start(window, n_tokens) for window in self.windows]

    def _start(self, window: int, n_tokens: int) -> int:
        return first_page(window, n_tokens - n_tokens % self.page_size, self.page_size)

    def n_fitting(self, seq: Seq, n_available: int) -> int:
        """Tokens that `seq` has room for with so many pages more, beyond those that are planned."""
        return (len(seq.tables[0]) + n_available // self.n_groups) * self.page_size - seq.planned

    # ---- taking and finding --------------------------------------------------------------------------------------

    def grow(self, seq: Seq, n: int) -> list[list[int]]:
        """`n` fresh pages at the end of each table of a sequence; returns those of each."""
        pages = self.take(n * self.n_groups)
        seq.room += n * self.page_size
        if self.n_groups == 1:
            seq.tables[0] += pages
            return [pages]
        parts = [pages[at : at + n] for at in range(0, len(pages), n)]
        for table, part in zip(seq.tables, parts, strict=True):
            table += part
        return parts

    def match(self, seq: Seq, step: int) -> Match:
        """The cached prefix of a waiting sequence, at least one token short of all: that one's logits are needed.
        step: of the plan that would use it."""
        if not self.enabled:
            return NO_MATCH
        return self.tree.match(self.salt(seq), seq.tokens, len(seq.tokens) - 1, step)

    def salt(self, seq: Seq) -> str:
        """Sequences with the same one share pages."""
        return salt_of(seq.request, apart=self._is_apart(seq))

    def _is_apart(self, seq: Seq) -> bool:
        return self._config.deterministic_apart and seq.params.deterministic

    def hold(self, seq: Seq, found: Match) -> None:
        """Lock a match for `seq` and share its pages: it begins with them."""
        node = self.tree.lock(found)
        tables = [list(table) for table in found.tables] or [[] for _ in self.windows]
        self._begin(seq, tables, self.starts(found.n_pages * self.page_size))
        seq.node, seq.n_tree_pages = node, found.n_pages

    def fork(self, seq: Seq, source: Seq, n_tokens: int) -> None:
        """Share the full pages of the first `n_tokens` tokens of a running sequence, which `seq` has too, and lock
        those that are in the tree; one fresh page behind.

        The other must hold all that token number `n_tokens` and later ones see.
        """
        n = n_tokens // self.page_size
        starts = self.starts(n * self.page_size)
        tables = [[0] * first + table[first:n] for table, first in zip(source.tables, starts, strict=True)]
        self._begin(seq, tables, starts)
        n_tree_pages = min(n, source.n_tree_pages)
        found = self.tree.path(self.salt(seq), seq.tokens, n_tree_pages * self.page_size)
        seq.node, seq.n_tree_pages = self.tree.lock(found), found.n_pages
        self.grow(seq, 1)

    def can_fork(self, seq: Seq, source: Seq) -> bool:
        """Whether a running sibling still holds what is seen from the last page border of the prompt."""
        end, starts = self._config.pages_for(seq.prompt_len - 1), self.starts(seq.prompt_len - 1)
        return all(held <= first or first == end for held, first in zip(source.held_from, starts, strict=True))

    def _begin(self, seq: Seq, tables: list[list[int]], held_from: list[int]) -> None:
        for table in tables[: self.n_full]:
            self.pool.share(table)
        for table, first in zip(tables[self.n_full :], held_from[self.n_full :], strict=True):
            self.tree.window_pages.hold(table[first:])
        seq.tables, seq.held_from = tables, held_from
        seq.room = len(tables[0]) * self.page_size
        self._set_next_return(seq)

    # ---- leaving behind ------------------------------------------------------------------------------------------

    def publish(self, seq: Seq, *, leaving: bool = False) -> None:
        """Enter the pages that are full of planned tokens known to the host, and that `seq` alone holds, into the tree.

        While the sequence stays, only as long as nobody else has entered the same tokens: it must not lock a page
        that it does not use, or the last sequence of a full pool could not go on.
        """
        n_known = seq.prompt_len if self._is_apart(seq) else len(seq.tokens)
        n_whole, first = min(seq.planned, n_known) // self.page_size, seq.n_tree_pages
        if not self.enabled or n_whole <= first:
            return
        end = n_whole
        if self.n_full:
            refs, table, end = self.pool.refs, seq.tables[0], first
            while end < n_whole and refs[table[end]] == 1:  # a fork that shares it would hold it without a lock
                end += 1
        seq.node, seq.n_tree_pages = self.tree.extend(
            self.salt(seq), seq.node, first, seq.tokens, seq.tables, end, through=leaving
        )

    def place(self, seq: Seq, n_pages: int) -> Match | None:
        """The place in the tree behind the first pages of a sequence, if these are there."""
        found = self.tree.path(self.salt(seq), seq.tokens, n_pages * self.page_size)
        return found if found.node is not None and found.n_pages == n_pages else None

    def _settle(self, seq: Seq, keep: bool) -> None:
        """A sequence leaves: the states that it holds go where its pages are."""
        assert self.snapshots is not None
        for n in list(seq.snapshots) if keep else ():
            found = self.place(seq, n)
            if found is not None and found.node is not None:
                self.snapshots.move(seq, n, found.node, found.n_in_node)
        self.snapshots.drop_all(seq)

    def give_back(self, seq: Seq) -> None:
        """Drop the pages that no token behind the last computed page border sees."""
        for group in range(self.n_full, self.n_groups):
            held, first = seq.held_from[group], self._start(self.windows[group], seq.computed)
            if first > held:
                table = seq.tables[group]
                self.tree.drop_windows(table[held:first])
                table[held:first] = [0] * (first - held)
                seq.held_from[group] = first
        self._set_next_return(seq)

    def _set_next_return(self, seq: Seq) -> None:
        """The first page border from which a held page is not seen."""
        size = self.page_size
        pairs = zip(self.windows[self.n_full :], seq.held_from[self.n_full :], strict=True)
        seq.returns_at = min([(first + 1 - (1 - window) // size) * size for window, first in pairs], default=NEVER)

    def release(self, seq: Seq, *, keep: bool) -> None:
        """Give back everything a sequence holds; `keep` leaves its full pages in the tree."""
        if keep:
            self.publish(seq, leaving=True)
        if seq.snapshots:
            self._settle(seq, keep)
        if seq.node is not None:
            self.tree.unlock(seq.node)
        for table in seq.tables[: self.n_full]:
            self.pool.drop(reversed(table))
        for table, first in zip(seq.tables[self.n_full :], seq.held_from[self.n_full :], strict=True):
            self.tree.drop_windows(table[: first - 1 if first else None : -1])


def salt_of(request: Request, *, apart: bool = False) -> str:
    """The salt that a request brings, and what else keeps its pages from others': the content of its adapter, and
    apart. Different for whatever is different, whatever salts requests bring: content ids are hexadecimal."""
    if not apart and not request.content_id:
        return request.cache_salt
    return request.cache_salt + ("\0" if apart else "\1") * _RUN + request.content_id
