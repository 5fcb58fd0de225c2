"""The prefix tree: full pages of K/V found again by the exact token ids that lead to them.

A compressed radix tree at page granularity, one root for each cache salt (RadixAttention: Zheng et al. 2024, "SGLang",
section 3). Owns one reference of every page in it. Does not own sequences: they lock the node at which their path ends.
Invariants: a locked node has locked ancestors only; every node but a root has a page, so there are no more nodes than
pages; `n_unlocked` counts the pages of unlocked nodes, all of which can be evicted: leaves first, in order of last use.
"""

from __future__ import annotations

import struct

from quire.control.eviction import EvictionOrder
from quire.control.node import Match, Miss, Node
from quire.control.pages import PageError, PagePool


class PrefixTree:
    """See the module. Token lists may be longer than the pages that go with them; the rest is ignored."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[str, Node] = {}
        self.n_pages = 0
        self.n_unlocked = 0
        self.n_nodes = 0
        """Nodes with pages (roots not counted)."""
        self._pool = pool
        self._page = struct.Struct(f"<{page_size}q")
        self._order = EvictionOrder()
        self._tick = 0
        self._serial = 0

    # ---- reading -------------------------------------------------------------------------------------------------

    def match(self, salt: str, tokens: list[int], max_tokens: int) -> Match:
        """Longest cached path of `tokens[:max_tokens]` in whole pages. Changes nothing."""
        found = Match(self.roots.get(salt), 0, [], 0)
        last = min(max_tokens, len(tokens)) // self.page_size
        node = found.node
        while node is not None and len(found.pages) < last:
            child = node.children.get(self._page_key(tokens, len(found.pages)))
            if child is None:
                break
            n_same = self._common_pages(child, tokens, len(found.pages), last)
            found.node, found.n_in_node = child, n_same
            found.pages += child.pages[:n_same]
            found.n_unlocked += n_same if child.lock == 0 else 0
            node = child if n_same == len(child.pages) else None
        return found

    def explain(self, salt: str, tokens: list[int]) -> Miss:
        """Where the best cached path first differs from `tokens`: the reason of a miss, for people."""
        found = self.match(salt, tokens, len(tokens))
        n_matched = len(found.pages) * self.page_size
        rivals: list[list[int]] = []
        if found.node is not None and found.n_in_node < len(found.node.pages):
            rivals = [found.node.tokens[found.n_in_node * self.page_size :]]
        elif found.node is not None:
            rivals = [child.tokens for child in found.node.children.values()]
        rest = tokens[n_matched : n_matched + self.page_size]
        best, cached = 0, rivals[0][0] if rivals else None
        for rival in rivals:
            n_same = _common_tokens(rival, rest)
            if n_same >= best:
                best, cached = n_same, rival[n_same] if n_same < len(rival) else None
        return Miss(n_matched, n_matched + best, rest[best] if best < len(rest) else None, cached)

    # ---- locks ---------------------------------------------------------------------------------------------------

    def lock(self, found: Match) -> Node | None:
        """Hold exactly the matched path until `unlock`; returns the node at which it ends (None: nothing matched)."""
        node = found.node
        if node is None or not found.pages:
            return None
        if found.n_in_node < len(node.pages):
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
            if step.lock == 0:
                self.n_unlocked += len(step.pages)
                self._offer(step)
            step = step.parent

    def _lock_one(self, node: Node) -> None:
        if node.lock == 0:
            self.n_unlocked -= len(node.pages)
        node.lock += 1
        node.stamp = self._tick

    # ---- growing -------------------------------------------------------------------------------------------------

    def extend(
        self, salt: str, node: Node | None, n_held: int, tokens: list[int], pages: list[int], *, through: bool
    ) -> tuple[Node | None, int]:
        """Add `pages[n_held:]` (full pages of `tokens`) below `node`; the caller's lock moves to the new end.

        node: the end of the caller's locked path, which is pages[:n_held]; None when it holds none.
        A page that is there already keeps its place, and the caller's stays private. `through` goes on below it, for a
        caller about to unlock; without it the path ends above, so that nobody locks a page that it does not use.
        Returns the new end and the pages that the path has.
        """
        depth, end = n_held, len(pages)
        if depth == end:
            return node, depth
        self._tick += 1
        if node is None:
            root = self.roots.get(salt)
            if root is not None and not through and self._page_key(tokens, 0) in root.children:
                return None, 0
            node = self.roots[salt] = root or Node(None, salt, [], [], 0)
            self._lock_one(node)
        while depth < end:
            child = node.children.get(self._page_key(tokens, depth))
            if child is None:
                return self._append(node, tokens, pages, depth), end
            if not through:
                break
            n_same = self._common_pages(child, tokens, depth, end)
            node = child if n_same == len(child.pages) else self._split(child, n_same)
            self._lock_one(node)
            depth += n_same
        return node, depth

    def _append(self, node: Node, tokens: list[int], pages: list[int], depth: int) -> Node:
        """Put pages[depth:] behind `node`: into it when the caller alone holds this leaf, else as a new leaf."""
        new_tokens = tokens[depth * self.page_size : len(pages) * self.page_size]
        new_pages = pages[depth:]
        self._pool.share(new_pages)
        self.n_pages += len(new_pages)
        if node.pages and node.lock == 1 and not node.children:
            node.tokens += new_tokens
            node.pages += new_pages
            node.stamp = self._tick
            return node
        self._serial += 1
        child = Node(node, node.salt, new_tokens, new_pages, self._serial)
        node.children[self._page_key(new_tokens, 0)] = child
        child.lock, child.stamp = 1, self._tick
        self.n_nodes += 1
        return child

    def _split(self, node: Node, n_upper: int) -> Node:
        """Cut a node after `n_upper` pages; returns the upper part. The node stays the lower: locks point at ends."""
        parent = node.parent
        if parent is None:
            raise PageError("a root or a removed node of the prefix tree was split")
        cut = n_upper * self.page_size
        self._serial += 1
        upper = Node(parent, node.salt, node.tokens[:cut], node.pages[:n_upper], self._serial)
        upper.lock, upper.stamp = node.lock, node.stamp
        parent.children[self._page_key(node.tokens, 0)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[n_upper:], upper
        upper.children[self._page_key(node.tokens, 0)] = node
        self.n_nodes += 1
        return upper

    # ---- shrinking -----------------------------------------------------------------------------------------------

    def evict(self, n: int) -> None:
        """Free `n` pages of unlocked leaves, the ends of the longest unused first (PageError if there are fewer)."""
        if n > self.n_unlocked:
            raise PageError(f"{n} pages to evict, {self.n_unlocked} are unlocked: check before evicting")
        while n > 0:
            leaf = self._order.pop()
            if leaf is None:
                raise PageError("the prefix tree counts unlocked pages but has no unlocked leaf")
            n_cut = min(n, len(leaf.pages))
            self._trim(leaf, n_cut)
            n -= n_cut

    def _trim(self, leaf: Node, n_cut: int) -> None:
        keep = len(leaf.pages) - n_cut
        self._pool.drop(reversed(leaf.pages[keep:]))
        self.n_pages -= n_cut
        self.n_unlocked -= n_cut
        if keep == 0:
            self._remove(leaf)
            return
        del leaf.pages[keep:]
        del leaf.tokens[keep * self.page_size :]
        self._offer(leaf)

    def _remove(self, node: Node) -> None:
        """Unhook a node; what is left above it may become a leaf, an empty root goes."""
        parent = node.parent
        if parent is None:
            raise PageError("a node of the prefix tree was removed twice")
        del parent.children[self._page_key(node.tokens, 0)]
        node.parent = None
        self.n_nodes -= 1
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Enter a node into the eviction order, or drop an empty root, if it is an unlocked leaf now."""
        if node.lock or node.children:
            return
        if node.pages:
            self._order.push(node, self.n_nodes)
        else:
            self.roots.pop(node.salt, None)

    def subtree(self, node: Node) -> list[Node]:
        """`node` and everything below it, parents first."""
        nodes = [node]
        for inner in nodes:
            nodes.extend(inner.children.values())
        return nodes

    def cut(self, salt: str, tokens: list[int], index: int) -> Node:
        """The node that begins with page `index` of the path of `tokens`, split off if need be; PageError if none."""
        found = self.match(salt, tokens, (index + 1) * self.page_size)
        if found.node is None or len(found.pages) != index + 1:
            raise PageError(f"page {index} of the path is not in the prefix tree")
        if found.n_in_node > 1:
            self._split(found.node, found.n_in_node - 1)
        return found.node

    def detach(self, node: Node) -> None:
        """Take a node and all below it out of the tree: their K/V cannot be trusted. PageError while it is locked."""
        if node.lock:
            raise PageError("a locked part of the prefix tree cannot be detached: release its holders first")
        for inner in reversed(self.subtree(node)):
            self._pool.drop(inner.pages)
            self.n_pages -= len(inner.pages)
            self.n_unlocked -= len(inner.pages)
            self._remove(inner)

    def clear(self) -> None:
        """Detach everything (PageError while a sequence holds a path)."""
        for root in list(self.roots.values()):
            for child in list(root.children.values()):
                self.detach(child)

    # ---- comparing -----------------------------------------------------------------------------------------------

    def _page_key(self, tokens: list[int], index: int) -> bytes:
        return self._page.pack(*tokens[index * self.page_size : (index + 1) * self.page_size])

    def _common_pages(self, node: Node, tokens: list[int], depth: int, last: int) -> int:
        """Pages of `node` that equal tokens from page `depth` on, looking at pages before `last` only."""
        n = min(len(node.pages), last - depth)
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
