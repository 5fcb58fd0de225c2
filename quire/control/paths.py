"""Reading the prefix tree: the cached path of a prompt, how much of it is of use, and why there is no more.

Owns comparing and walking; changes nothing. Does not own how the tree grows and shrinks (`tree.py`).
A path is of use up to where every group of layers still has all that the token behind it sees.
"""

from __future__ import annotations

import struct

from quire.config.kv import first_page
from quire.control.node import Match, Miss, Node
from quire.control.pages import PageError, PagePool
from quire.control.snapshots import Snapshots
from quire.control.windows import WindowPages


class PrefixPaths:
    """Nodes below one root for each salt. windows: of each group of layers, those without (0) first."""

    def __init__(
        self, pool: PagePool, page_size: int, windows: tuple[int, ...], snapshots: Snapshots | None = None
    ) -> None:
        self.page_size = page_size
        self.roots: dict[str, Node] = {}
        self.window_pages = WindowPages(pool)
        self.windows = windows
        self.snapshots = snapshots
        """Of a model with recurrent states."""
        self._n_full = windows.count(0)
        self._page = struct.Struct(f"<{page_size}q")

    def path(self, salt: str, tokens: list[int], max_tokens: int) -> Match:
        """Longest cached path of `tokens[:max_tokens]` in whole pages, whatever windows have lost. Changes nothing."""
        tables: list[list[int]] = [[] for _ in self.windows]
        node = self.roots.get(salt)
        found = Match(node, 0, tables, 0)
        n, last = 0, min(max_tokens, len(tokens)) // self.page_size
        while node is not None and n < last:
            child = node.children.get(self._page_key(tokens, n))
            if child is None:
                break
            n_same = self._common_pages(child, tokens, n, last)
            found.node, found.n_in_node = child, n_same
            for table, part in zip(tables, child.tables, strict=True):
                table += part[:n_same]
            found.n_unlocked += n_same * self._n_full if child.lock == 0 else 0
            n += n_same
            node = child if n_same == child.n_pages else None
        return found

    def match(self, salt: str, tokens: list[int], max_tokens: int, step: int = 0) -> Match:
        """The longest part of that path behind which the next token finds all that it sees, in every group, and its
        state, where there are any. step: of the plan that would use it."""
        found = self.path(salt, tokens, max_tokens)
        found.n_shared = found.n_pages
        if self.snapshots is not None:
            self._to_snapshot(found, self.snapshots, step)
        if self._n_full < len(self.windows):
            if self.snapshots is None:
                self._shorten(found, _n_usable(found.tables, self.windows, self.page_size))
            for table, window in zip(found.tables, self.windows, strict=True):
                if window:
                    first = first_page(window, found.n_pages * self.page_size, self.page_size)
                    table[:first] = [0] * first
                    found.n_unlocked += self.window_pages.n_unreferenced(table[first:])
        return found

    def _to_snapshot(self, found: Match, snapshots: Snapshots, step: int) -> None:
        """Cut a path to where a state was kept and no group lacks a page."""
        n_before = -1
        while found.n_pages != n_before:
            n_before = found.n_pages
            if self._n_full < len(self.windows):
                self._shorten(found, _n_usable(found.tables, self.windows, self.page_size))
            n_pages, found.snapshot = snapshots.best(found, step)
            self._shorten(found, n_pages)

    def _snapshots_of(self, node: Node) -> Snapshots:
        """The keeper of those that a node has."""
        if self.snapshots is None:
            raise PageError("a node has a snapshot of a model without states")
        return self.snapshots

    def _shorten(self, found: Match, n: int) -> None:
        """Cut a path to its first `n` pages."""
        n_more = found.n_pages - n
        for table in found.tables:
            del table[n:]
        while n_more and found.node is not None:
            n_cut = min(n_more, found.n_in_node)
            found.n_unlocked -= n_cut * self._n_full if found.node.lock == 0 else 0
            found.n_in_node -= n_cut
            n_more -= n_cut
            if not found.n_in_node:
                found.node = found.node.parent
                found.n_in_node = found.node.n_pages if found.node is not None else 0

    def explain(self, salt: str, tokens: list[int]) -> Miss:
        """Where the best cached path first differs from `tokens`: the reason of a miss, for people."""
        found = self.path(salt, tokens, len(tokens))
        n_matched = found.n_pages * self.page_size
        n_lost = n_matched - _n_usable(found.tables, self.windows, self.page_size) * self.page_size
        rivals: list[list[int]] = []
        if found.node is not None and found.n_in_node < found.node.n_pages:
            rivals = [found.node.tokens[found.n_in_node * self.page_size :]]
        elif found.node is not None:
            rivals = [child.tokens for child in found.node.children.values()]
        rest = tokens[n_matched : n_matched + self.page_size]
        best, cached = 0, rivals[0][0] if rivals else None
        for rival in rivals:
            n_same = _common_tokens(rival, rest)
            if n_same >= best:
                best, cached = n_same, rival[n_same] if n_same < len(rival) else None
        return Miss(n_matched, n_matched + best, rest[best] if best < len(rest) else None, cached, n_lost)

    def subtree(self, node: Node) -> list[Node]:
        """`node` and everything below it, parents first."""
        nodes = [node]
        for inner in nodes:
            nodes.extend(inner.children.values())
        return nodes

    def _page_key(self, tokens: list[int], index: int) -> bytes:
        return self._page.pack(*tokens[index * self.page_size : (index + 1) * self.page_size])

    def _common_pages(self, node: Node, tokens: list[int], depth: int, last: int) -> int:
        """Pages of `node` that equal tokens from page `depth` on, looking at pages before `last` only."""
        n = min(node.n_pages, last - depth)
        size, start = self.page_size, depth * self.page_size
        if node.tokens[: n * size] == tokens[start : start + n * size]:
            return n
        low, high = 0, n  # pages[:low] are equal, pages[:high] are not
        while high - low > 1:
            middle = (low + high) // 2
            if node.tokens[low * size : middle * size] == tokens[start + low * size : start + middle * size]:
                low = middle
            else:
                high = middle
        return low


def _common_tokens(first: list[int], second: list[int]) -> int:
    n = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        n += 1
    return n


def _n_usable(tables: list[list[int]], windows: tuple[int, ...], page_size: int) -> int:
    """Pages of the longest part of a path behind which no group lacks a page that the next token sees."""
    n, before = len(tables[0]), -1
    while n != before:
        before = n
        for table, window in zip(tables, windows, strict=True):
            if window:
                n = _n_usable_of(table, n, window, page_size)
    return n


def _n_usable_of(table: list[int], n: int, window: int, page_size: int) -> int:
    """The same for one group and the first `n` pages."""
    i, first = n, first_page(window, n * page_size, page_size)
    while i > first:
        i -= 1
        if not table[i]:
            n, first = i, first_page(window, i * page_size, page_size)
    return n
