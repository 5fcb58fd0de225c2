"""Which decoding sequences of a step share leading pages: the hint by which attention reads a common prefix once.

Reads the prefix tree's nodes; changes nothing. Invariant: groups are disjoint, have two members or more, and the first
`n_pages` pages of all members are the same pages, in every group of layers that keeps everything.
"""

from __future__ import annotations

import dataclasses
import heapq

from quire.control.node import Node
from quire.control.seq import Seq


@dataclasses.dataclass(slots=True)
class _Group:
    """Sequences that pass through one node."""

    slots: list[int]
    n_pages: int = 0
    """Pages from the root to the node's end."""
    are_apart: bool = False
    """Each still reads them for itself."""

    @property
    def n_read(self) -> int:
        """Pages that are read, as long as it is joined with no other."""
        return self.n_pages * (len(self.slots) if self.are_apart else 1)


def shared_prefixes(seqs: list[Seq], min_pages: int) -> list[tuple[list[int], int]]:
    """(slots, number of leading pages they share) for prefixes of at least `min_pages` pages. seqs: of one tree."""
    apart: dict[Node, list[int]] = {}
    for seq in seqs:
        node = seq.node
        while node is not None and node.lock < 2:
            node = node.parent
        if node is not None and node.parent is not None:  # the root has no pages
            apart.setdefault(node, []).append(seq.slot)
    queue = [(-_depth(node), node.serial, node) for node in apart]
    heapq.heapify(queue)
    if not queue or -queue[0][0] < min_pages:  # no group is longer than the deepest node
        return []
    open_at = {node: [_Group(slots, are_apart=True)] for node, slots in apart.items()}
    done: list[_Group] = []
    while queue:
        depth, _, node = heapq.heappop(queue)  # deepest first, so that all groups below have come up
        groups = open_at.pop(node)
        for group in groups:
            group.n_pages = max(group.n_pages, -depth)
        joined = _join(groups, -depth, done)
        parent = node.parent
        if joined is None:
            continue
        if parent is None or parent.parent is None:
            done.append(joined)
            continue
        if parent not in open_at:
            heapq.heappush(queue, (depth + node.n_pages, parent.serial, parent))
        open_at.setdefault(parent, []).append(joined)
    return [(group.slots, group.n_pages) for group in done if not group.are_apart and group.n_pages >= min_pages]


def _join(groups: list[_Group], depth: int, done: list[_Group]) -> _Group | None:
    """One group at `depth` if that reads fewer pages than the groups alone; else those are done, and one goes on."""
    together = depth + sum(len(group.slots) * (group.n_pages - depth) for group in groups)
    if together < sum(group.n_read for group in groups):
        return _Group([slot for group in groups for slot in group.slots], depth)
    if len(groups) == 1:
        return groups[0]
    done += groups
    return None


def _depth(node: Node) -> int:
    n_pages, step = 0, node
    while step.parent is not None:
        n_pages += step.n_pages
        step = step.parent
    return n_pages
