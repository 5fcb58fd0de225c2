"""Snapshots of recurrent states: which are kept, at which places of the prefix tree, and which goes next.

A sequence of a model with states can go on from a cached prefix only where the state behind it was kept. Owns the ids
of snapshots and the order of their use. Does not own nodes (`tree.py`), nor states (compute).
Invariants: an id is free or at one place; a snapshot goes with its page; one that a plan takes is of use to later plans
only; an id may be taken again by a plan that also restores it, as compute restores before it takes. A sequence whose
pages are not in the tree yet holds its snapshots itself until they are.
"""

from __future__ import annotations

from typing import Final, Protocol

from quire.control.node import Match, Node

EVERY_TOKENS: Final = 1024
"""Distance of snapshots within a prompt: what a prompt that leaves a long one somewhere computes again at most."""
NEVER: Final = -1


class Holder(Protocol):
    """A node, or a sequence."""

    snapshots: dict[int, int]
    """Number of its pages → the snapshot behind them."""


class Snapshots:
    """`n`: how many there are."""

    def __init__(self, n: int, page_size: int) -> None:
        self.n = n
        self._page_size = page_size
        self._every = max(page_size, EVERY_TOKENS - EVERY_TOKENS % page_size)
        self._free = list(range(n - 1, -1, -1))
        self._late: list[int] = []
        """Free once the plan of step `_now` is written, which takes states into them."""
        self._now = -1
        self._places: dict[int, Holder] = {}
        """In order of use, the next to go first."""
        self._step: dict[int, int] = {}
        """The plan that takes each."""

    @property
    def n_used(self) -> int:
        """Taken."""
        return len(self._places)

    # ---- finding -------------------------------------------------------------------------------------------------

    def best(self, found: Match, step: int) -> tuple[int, int]:
        """(pages, id) of the longest part of a path that has a snapshot which a plan before `step` has taken; (0,
        NEVER) if there is none."""
        node, n_in_node, first = found.node, found.n_in_node, found.n_pages - found.n_in_node
        while node is not None:
            usable = [
                (first + n, one) for n, one in node.snapshots.items() if n <= n_in_node and self._step[one] < step
            ]
            if usable:
                return max(usable)
            node = node.parent
            n_in_node = node.n_pages if node is not None else 0
            first -= n_in_node
        return 0, NEVER

    def use(self, snapshot: int) -> None:
        """It is the last to go now."""
        self._places[snapshot] = self._places.pop(snapshot)

    # ---- taking and leaving --------------------------------------------------------------------------------------

    def places(self, start: int, end: int, known: int, shared: int) -> list[int]:
        """Where the state of a prompt of `known` tokens is to be kept, within tokens (start, end]: at its last page
        border before the last token, which a prompt like it goes on from, at the end of what an earlier one had in
        common with it (`shared` tokens, whole pages), and every `EVERY_TOKENS`."""
        size, every = self._page_size, self._every
        wanted = {(known - 1) // size * size, shared, *range(start - start % every + every, end + 1, every)}
        return sorted(place for place in wanted if start < place <= end and place < known)

    def is_due(self, n_tokens: int) -> bool:
        """Whether a decoding sequence of so many tokens keeps its state."""
        return n_tokens % self._every == 0

    def take(self, holder: Holder, n_pages: int, step: int) -> int | None:
        """An id for the state behind the first `n_pages` pages of a holder; None where there is one, or none to be had.

        One that the same plan takes is not given away.
        """
        if step > self._now:
            self._free += self._late
            self._late, self._now = [], step
        if n_pages in holder.snapshots:
            return None
        if not self._free:
            oldest = next((one for one in self._places if self._step[one] < step), None)
            if oldest is None:
                return None
            self.drop(oldest)
        snapshot = self._free.pop()
        holder.snapshots[n_pages] = snapshot
        self._places[snapshot], self._step[snapshot] = holder, step
        return snapshot

    def drop(self, snapshot: int) -> None:
        """It is of no use any more."""
        holder, step = self._places.pop(snapshot), self._step.pop(snapshot)
        at = next(n for n, one in holder.snapshots.items() if one == snapshot)
        del holder.snapshots[at]
        (self._late if step == self._now else self._free).append(snapshot)

    def move(self, source: Holder, n: int, target: Holder, n_there: int) -> None:
        """Give one to another holder, if that has none there."""
        snapshot = source.snapshots[n]
        if n_there in target.snapshots:
            self.drop(snapshot)
            return
        del source.snapshots[n]
        target.snapshots[n_there], self._places[snapshot] = snapshot, target

    def drop_all(self, holder: Holder) -> None:
        """All of a holder."""
        for snapshot in list(holder.snapshots.values()):
            self.drop(snapshot)

    def distrust(self, found: Match) -> None:
        """Drop all on a path."""
        node = found.node
        while node is not None:
            self.drop_all(node)
            node = node.parent

    # ---- what becomes of nodes -----------------------------------------------------------------------------------

    def cut(self, node: Node, keep: int) -> None:
        """Pages from number `keep` on leave a node."""
        for n in [n for n in node.snapshots if n > keep]:
            self.drop(node.snapshots[n])

    def split(self, upper: Node, lower: Node) -> None:
        """A node was cut in two: its first pages went to `upper`."""
        n_upper, old = upper.n_pages, lower.snapshots
        upper.snapshots = {n: one for n, one in old.items() if n <= n_upper}
        lower.snapshots = {n - n_upper: one for n, one in old.items() if n > n_upper}
        for snapshot in upper.snapshots.values():
            self._places[snapshot] = upper
