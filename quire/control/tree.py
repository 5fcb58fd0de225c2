"""The prefix tree: full pages of K/V found again by the exact token ids that lead to them.

A compressed radix tree at page granularity, one root for each cache salt (RadixAttention: Zheng et al. 2024, "SGLang",
section 3), with a page of each group of layers at each place, or none in a group with a window. Owns one reference of
every page in it. Does not own sequences: they lock the node at which their path ends.
Invariants: a locked node has locked ancestors only; a leaf has a page at its end; `n_unlocked` counts the pages, of
groups that keep everything, of unlocked nodes, all of which can be evicted: leaves first, in order of last use. Pages
of groups with a window are not locked: each can be evicted when no sequence holds it (`windows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.control.digests import DIGEST_BYTES
from quire.control.eviction import EvictionOrder
from quire.control.node import Match, Node
from quire.control.pages import PageError, PagePool
from quire.control.paths import PrefixPaths
from quire.control.snapshots import Snapshots


class Digests(Protocol):
    """Whoever keeps digests of what a tree holds (`tree_digests.py`)."""

    def grown(self, node: Node, n_before: int) -> None:
        """A node has more than its first `n_before` pages now."""

    def cut(self, node: Node, n_left: int) -> None:
        """A node is about to lose all but its first `n_left` pages."""


class PrefixTree(PrefixPaths):
    """See the module. Token lists may be longer than the pages that go with them; the rest is ignored."""

    def __init__(
        self, pool: PagePool, page_size: int, windows: tuple[int, ...] = (0,), snapshots: Snapshots | None = None
    ) -> None:
        super().__init__(pool, page_size, windows, snapshots)
        self.n_pages = 0
        """Of all groups together."""
        self.n_unlocked = 0
        self.n_nodes = 0
        """Nodes with pages (roots not counted)."""
        self.n_common = 0
        """Of these, those that several sequences have locked."""
        self.digests: Digests | None = None
        """None: nobody follows what the tree holds."""
        self._pool = pool
        self._order = EvictionOrder()
        self._tick = 0
        self._serial = 0

    @property
    def n_evictable(self) -> int:
        """Pages that no sequence holds."""
        return self.n_unlocked + len(self.window_pages.unreferenced)

    # ---- locks ---------------------------------------------------------------------------------------------------

    def lock(self, found: Match) -> Node | None:
        """Hold exactly the matched path until `unlock`; returns the node at which it ends (None: nothing matched)."""
        node = found.node
        if node is None or not found.n_pages:
            return None
        if found.n_in_node < node.n_pages:
            node = self._split(node, found.n_in_node)
        self._tick += 1
        step: Node | None = node
        while step is not None:
            self._lock_one(step)
            step = step.parent
        return node

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; the path may be evicted when nobody else holds it, and counts as used now."""
        self._tick += 1
        step: Node | None = node
        while step is not None:
            if step.lock <= 0:
                raise PageError("a path of the prefix tree was unlocked more often than locked")
            step.lock -= 1
            step.stamp = self._tick
            parent = step.parent
            if step.lock == 1 and parent is not None:
                self.n_common -= 1
            if step.lock == 0:
                self.n_unlocked += step.n_pages * self._n_full
                self._offer(step)
            step = parent

    def drop_windows(self, pages: Sequence[int]) -> None:
        """A sequence is no owner of these pages any more (zeros do not count), of groups with a window."""
        self.window_pages.drop(pages, self._tick)

    def _lock_one(self, node: Node) -> None:
        if node.lock == 0:
            self.n_unlocked -= node.n_pages * self._n_full
        node.lock += 1
        if node.lock == 2 and node.parent is not None:
            self.n_common += 1
        node.stamp = self._tick

    # ---- growing -------------------------------------------------------------------------------------------------

    def extend(
        self,
        salt: str,
        node: Node | None,
        n_held: int,
        tokens: list[int],
        tables: list[list[int]],
        end: int,
        *,
        through: bool,
    ) -> tuple[Node | None, int]:
        """Add pages [n_held, end) of `tables` (full pages of `tokens`, of each group) below `node`; the caller's lock
        moves to the new end.

        node: the end of the caller's locked path, the first `n_held` pages; None when it holds none.
        A page that is there already keeps its place, and the caller's stays private; one that a window has lost comes
        back. `through` goes on below what is there, for a caller about to unlock; without it the path ends above, so
        that nobody locks a page that it does not use.
        Returns the new end and the pages that the path has.
        """
        depth = n_held
        if depth == end:
            return node, depth
        self._tick += 1
        if node is None:
            root = self.roots.get(salt)
            if root is not None and not through and (child := root.children.get(self._page_key(tokens, 0))):
                self._restore(child, tokens, tables, depth, end)
                return None, 0
            node = self.roots[salt] = root or Node(None, salt, [], [[] for _ in self.windows], 0)
            self._lock_one(node)
        while depth < end:
            child = node.children.get(self._page_key(tokens, depth))
            if child is None:
                return self._append(node, tokens, tables, depth, end), end
            self._restore(child, tokens, tables, depth, end)
            if not through:
                break
            n_same = self._common_pages(child, tokens, depth, end)
            node = child if n_same == child.n_pages else self._split(child, n_same)
            self._lock_one(node)
            depth += n_same
        return node, depth

    def _append(self, node: Node, tokens: list[int], tables: list[list[int]], depth: int, end: int) -> Node:
        """Put pages [depth, end) behind `node`: into it when the caller alone holds this leaf, else as a new leaf."""
        new_tokens = tokens[depth * self.page_size : end * self.page_size]
        new_tables = [table[depth:end] for table in tables]
        if node.parent is not None and node.lock == 1 and not node.children:
            node.tokens += new_tokens
            for own, new in zip(node.tables, new_tables, strict=True):
                own += new
            self._enter(node, new_tables)
            if self.digests is not None:
                self.digests.grown(node, node.n_pages - end + depth)
            node.stamp = self._tick
            return node
        self._serial += 1
        child = Node(node, node.salt, new_tokens, new_tables, self._serial)
        self._enter(child, new_tables)
        node.children[self._page_key(new_tokens, 0)] = child
        child.lock, child.stamp = 1, self._tick
        self.n_nodes += 1
        if self.digests is not None:
            self.digests.grown(child, 0)
        return child

    def _enter(self, node: Node, tables: list[list[int]]) -> None:
        """Become an owner of pages that are in tables of `node`."""
        for table in tables[: self._n_full]:
            self._pool.share(table)
            self.n_pages += len(table)
        for group in range(self._n_full, len(tables)):
            self.n_pages += self.window_pages.enter(tables[group], node, group)

    def _restore(self, node: Node | None, tokens: list[int], tables: list[list[int]], depth: int, end: int) -> None:
        """Pages [depth, end) of a sequence go where nodes from `node` on lack the page of a window."""
        while self._n_full < len(tables) and node is not None and depth < end:
            n_same = self._common_pages(node, tokens, depth, end)
            for group in range(self._n_full, len(tables)):
                own, new = node.tables[group], tables[group][depth : depth + n_same]
                lacking = [i for i, page in enumerate(new) if page and not own[i]]
                for i in lacking:
                    own[i] = new[i]
                self.n_pages += self.window_pages.enter([new[i] for i in lacking], node, group)
            depth += n_same
            goes_on = n_same == node.n_pages and depth < end
            node = node.children.get(self._page_key(tokens, depth)) if goes_on else None

    def _split(self, node: Node, n_upper: int) -> Node:
        """Cut a node after `n_upper` pages; returns the upper part. The node stays the lower: locks point at ends."""
        parent = node.parent
        if parent is None:
            raise PageError("a root or a removed node of the prefix tree was split")
        cut = n_upper * self.page_size
        self._serial += 1
        upper = Node(parent, node.salt, node.tokens[:cut], [table[:n_upper] for table in node.tables], self._serial)
        upper.lock, upper.stamp = node.lock, node.stamp
        if node.lock > 1:
            self.n_common += 1
        parent.children[self._page_key(node.tokens, 0)] = upper
        node.tokens, node.parent = node.tokens[cut:], upper
        node.tables = [table[n_upper:] for table in node.tables]
        upper.children[self._page_key(node.tokens, 0)] = node
        n_bytes = n_upper * DIGEST_BYTES
        upper.digests, node.digests = node.digests[:n_bytes], node.digests[n_bytes:]
        if node.snapshots:
            self._snapshots_of(node).split(upper, node)
        for group in range(self._n_full, len(upper.tables)):
            self.window_pages.move(upper.tables[group], upper, group)
        self.n_nodes += 1
        return upper

    # ---- shrinking -----------------------------------------------------------------------------------------------

    def evict(self, n: int) -> None:
        """Free at least `n` pages, what was unused longest first: the ends of unlocked leaves, and pages of windows.

        PageError if there are fewer.
        """
        if n > self.n_evictable:
            raise PageError(f"{n} pages to evict, {self.n_evictable} are unlocked: check before evicting")
        pages = self.window_pages
        while n > 0:
            leaf, oldest = self._order.peek(), pages.oldest if pages.unreferenced else None
            if oldest is not None and (leaf is None or oldest[0] <= leaf.stamp):
                self._evict_page(oldest[1])
                n -= 1
            elif leaf is not None:
                self._order.pop()
                n -= self._trim(leaf, min(-(-n // self._n_full), leaf.n_pages))
            else:
                raise PageError("the prefix tree counts unlocked pages but has no unlocked leaf")

    def _trim(self, leaf: Node, n_cut: int) -> int:
        """Cut the last pages of an unlocked leaf off; returns how many are free by that."""
        parent = leaf.parent
        n_free = self._cut_off(leaf, n_cut)
        self._offer(leaf if leaf.parent is not None else parent)
        return n_free

    def _cut_off(self, leaf: Node, n_cut: int) -> int:
        """The same, for a caller that looks after the leaf, or its parent if that has become one."""
        keep, parent = leaf.n_pages - n_cut, leaf.parent
        if parent is None:
            raise PageError("a node of the prefix tree was removed twice")
        if leaf.snapshots:
            self._snapshots_of(leaf).cut(leaf, keep)
        if self.digests is not None:
            self.digests.cut(leaf, keep)
        for table in leaf.tables[: self._n_full]:
            self._pool.drop(reversed(table[keep:]))
        n_free = n_cut * self._n_full
        self.n_unlocked -= n_free
        self.n_pages -= n_free
        for table in leaf.tables[self._n_full :]:
            n_gone, n_unreferenced = self.window_pages.leave(table[keep:])
            self.n_pages -= n_gone
            n_free += n_unreferenced
        if keep == 0:
            del parent.children[self._page_key(leaf.tokens, 0)]
            leaf.parent = None
            self.n_nodes -= 1
            return n_free
        for table in leaf.tables:
            del table[keep:]
        del leaf.tokens[keep * self.page_size :]
        return n_free

    def _evict_page(self, page: int) -> None:
        """Take one page of a window out of its node."""
        node, group = self.window_pages.places[page]
        self.window_pages.leave((page,))
        self.n_pages -= 1
        table = node.tables[group]
        table[table.index(page)] = 0
        if not self._n_full:
            self._offer(node)

    def discard(self, pages: set[int]) -> None:
        """Take those of these pages out of the tree that are of groups with a window: their K/V cannot be trusted."""
        for page in pages.intersection(self.window_pages.places):
            self._evict_page(page)

    def _offer(self, node: Node | None) -> None:
        """Enter a node into the eviction order, or drop an empty root, if it is an unlocked leaf now.

        Without groups that keep everything, pages go one by one, and what has none left at its end is cut off.
        """
        while node is not None and not node.lock and not node.children:
            parent = node.parent
            if parent is None:
                self.roots.pop(node.salt, None)
                return
            if self._n_full:
                self._order.push(node, self.n_nodes)
                return
            n_held = max([_n_until_last(table) for table in node.tables])
            if n_held == node.n_pages:
                return
            self._cut_off(node, node.n_pages - n_held)
            node = parent if node.parent is None else None

    def cut(self, salt: str, tokens: list[int], index: int) -> Node:
        """The node that begins with page `index` of the path of `tokens`, split off if need be; PageError if none."""
        found = self.path(salt, tokens, (index + 1) * self.page_size)
        if found.node is None or found.n_pages != index + 1:
            raise PageError(f"page {index} of the path is not in the prefix tree")
        if found.n_in_node > 1:
            self._split(found.node, found.n_in_node - 1)
        return found.node

    def detach(self, node: Node) -> None:
        """Take a node and all below it out of the tree: their K/V cannot be trusted. PageError while it is locked."""
        if node.lock:
            raise PageError("a locked part of the prefix tree cannot be detached: release its holders first")
        for inner in reversed(self.subtree(node)):
            if inner.parent is not None:  # else it was cut off with the last leaf below it
                self._trim(inner, inner.n_pages)

    def clear(self) -> None:
        """Detach everything (PageError while a sequence holds a path)."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self.detach(child)


def _n_until_last(table: list[int]) -> int:
    """Length without the zeros at the end."""
    n = len(table)
    while n and not table[n - 1]:
        n -= 1
    return n
