"""Which leaf of the prefix tree goes next: unlocked leaves in order of last use, kept incrementally (no walk).

Owns the order only; `tree.py` says when a node becomes a leaf without locks and removes it.
Invariant: every unlocked leaf has an entry with its present stamp; older entries are stale and skipped,
and dropped when they outnumber the nodes.
"""

from __future__ import annotations

import heapq

from quire.control.node import Node


def is_evictable(node: Node) -> bool:
    """An unlocked leaf that is still in the tree."""
    return node.lock == 0 and not node.children and node.parent is not None


class EvictionOrder:
    """A heap of (stamp, serial, node) with lazy removal: push O(log n), next O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node, n_nodes: int) -> None:
        """Enter an unlocked leaf; `n_nodes` is the size of the tree, which bounds the heap."""
        heapq.heappush(self._heap, (node.stamp, node.serial, node))
        if len(self._heap) > 2 * n_nodes + 64:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def peek(self) -> Node | None:
        """The unlocked leaf that was used longest ago, or None. Its entry stays."""
        while self._heap:
            entry = self._heap[0]
            if self._is_valid(entry):
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the entry that `peek` has just found."""
        heapq.heappop(self._heap)

    @staticmethod
    def _is_valid(entry: tuple[int, int, Node]) -> bool:
        return entry[0] == entry[2].stamp and is_evictable(entry[2])
