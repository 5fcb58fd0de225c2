"""`BranchingSuffixTree`: several ways on from each place, by their counts.

Owns the search for the likeliest nodes. Does not own the tree (`suffix_tree.py`) nor how far to guess (`suffix.py`).
A place is (node, child, length): `length` tokens end on the edge from node to child, or at the node.
"""

from __future__ import annotations

import heapq

from quire.compute.draft.suffix_tree import END, ROOT, Place, SuffixTree


class BranchingSuffixTree(SuffixTree):
    """A suffix tree that can be asked for trees."""

    def branch(
        self, place: Place, text: list[int], n: int, least: float, most_children: int
    ) -> tuple[list[int], list[int], float]:
        """As `follow`, the n likeliest tokens of all ways on: with each its parent, -1 for the text's end. Of what is
        equally likely the deeper one comes first."""
        node, length = place.node, place.length
        tokens, parents, total = list[int](), list[int](), 0.0
        heap: list[tuple[float, int, int, int, int, int, int]] = []
        self._push(heap, -1, 1.0, (node, self._edge(node, text, len(text) - length, length), length), most_children)
        while heap and len(tokens) < n:
            chance, _, parent, token, *at = heapq.heappop(heap)
            if -chance < least:
                break
            tokens.append(token)
            parents.append(parent)
            total -= chance
            self._push(heap, len(tokens) - 1, -chance, self._stepped(*at), most_children)
        return tokens, parents, total

    def _push(
        self, heap: list[tuple[float, int, int, int, int, int, int]], parent: int, chance: float,
        at: tuple[int, int, int], most: int,
    ) -> None:  # fmt: skip
        """Add what may follow a place: (-probability, order, parent, token, node, child, length)."""
        node, child, length = at
        counts, positions, below = self._count, self._position, [child]
        if length == self._depth[node]:
            below = heapq.nlargest(most, self._children[node].values(), key=lambda one: (counts[one], positions[one]))
        for rank, one in enumerate(below):
            first = positions[one] + length - self._base
            token = self.tokens[first] if first < len(self.tokens) else END  # an edge may go on behind what is known
            share = counts[one] / counts[node] if length == self._depth[node] else 1.0
            if token != END:
                heapq.heappush(heap, (-chance * share, rank - most * (1 + parent), parent, token, node, one, length))

    def _stepped(self, node: int, child: int, length: int) -> tuple[int, int, int]:
        """The place one token further on an edge."""
        length += 1
        if length < self._depth[child]:
            return node, child, length
        if self._children[child]:
            return child, ROOT, length
        first = self._position[child] + 1 - self._base  # as deep as the tree is: the first token is forgotten
        node = self._below(self._link[node], self.tokens, first, length - 1)
        return node, self._edge(node, self.tokens, first, length - 1), length - 1
