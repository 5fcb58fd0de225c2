"""What the prefix trees of an engine hold, told to followers in small updates: digests that came, and that went.

Owns the digests of nodes (`Node.digests`) while somebody follows, and what each follower is yet to be told. Does not
own trees, which report each page that comes or goes, nor the way to followers (`engine/prefix_updates.py`).
Invariants: what a follower was told, and what waits for it, make up what the trees hold; what came and went between two
updates is never told; what went is told before what came, so that a follower never knows more pages than there were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from quire.control.cache import PageCache
from quire.control.digests import DIGEST_BYTES, cut_up, following, salt_digest
from quire.control.node import Node
from quire.core.events import PrefixUpdate

MAX_UPDATE: Final = 8192
"""Digests of one update, 64 KiB: what does not fit comes with the next."""


class _Follower:
    """What one of them is yet to be told. Dicts are sets in the order of entry here."""

    def __init__(self) -> None:
        self._number = 0
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if digest in self._removed:
                del self._removed[digest]
            else:
                self._added[digest] = None

    def remove(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if digest in self._added:
                del self._added[digest]
            else:
                self._removed[digest] = None

    def update(self) -> PrefixUpdate:
        """The next one."""
        removed = _taken(self._removed, MAX_UPDATE)
        added = _taken(self._added, MAX_UPDATE - len(removed))
        number, self._number = self._number, self._number + 1
        return PrefixUpdate(number, b"".join(removed), b"".join(added), self.n_waiting)

    @property
    def n_waiting(self) -> int:
        """Digests that it is yet to be told."""
        return len(self._added) + len(self._removed)


class TreeDigests:
    """See the module. Costs nothing before the first `follow`."""

    def __init__(self) -> None:
        self._followers: dict[int, _Follower] = {}
        self._caches: Sequence[PageCache] = ()
        """Whose trees report here."""
        self._n_holders: dict[bytes, int] | None = None
        """Digest → how many of several trees hold it; None: there is one tree."""

    def follow(self, ticket: int, caches: Sequence[PageCache]) -> None:
        """Tell whoever has this ticket what the trees hold: all of it first, again if it follows already. caches: of
        the engine's data-parallel ranks."""
        self._attach(caches)
        self._begin(ticket)

    def unfollow(self, ticket: int) -> None:
        """It is gone."""
        self._followers.pop(ticket, None)
        if not self._followers:
            for cache in self._caches:
                cache.tree.digests = None
            self._caches = ()

    def updates(self, caches: Sequence[PageCache]) -> Iterator[tuple[int, PrefixUpdate]]:
        """(ticket, its next update) of every follower. caches: those of now; others, after a failure, are told anew."""
        if not self._followers:
            return
        self._attach(caches)
        for ticket, follower in list(self._followers.items()):
            yield ticket, follower.update()

    @property
    def n_waiting(self) -> int:
        """Digests that followers are yet to be told, together."""
        return sum(follower.n_waiting for follower in self._followers.values())

    # ---- what trees report ---------------------------------------------------------------------------------------

    def grown(self, node: Node, n_before: int) -> None:
        """A node has more than its first `n_before` pages now."""
        digests = self._extend(node, n_before)
        if self._n_holders is not None:
            digests = self._first_held(digests)
        for follower in self._followers.values():
            follower.add(digests)

    def cut(self, node: Node, n_left: int) -> None:
        """A node is about to lose all but its first `n_left` pages."""
        digests = cut_up(node.digests[n_left * DIGEST_BYTES :])
        node.digests = node.digests[: n_left * DIGEST_BYTES]
        if self._n_holders is not None:
            digests = self._last_held(digests)
        for follower in self._followers.values():
            follower.remove(digests)

    def _begin(self, ticket: int) -> None:
        """Whoever has this ticket knows nothing."""
        follower = self._followers[ticket] = _Follower()
        if self._n_holders is not None:
            follower.add([*self._n_holders])
        else:
            follower.add([digest for node in _nodes(self._caches) for digest in cut_up(node.digests)])

    def _attach(self, caches: Sequence[PageCache]) -> None:
        """Have these report here; if it was others, all followers know nothing."""
        if caches is self._caches:
            return
        for cache in self._caches:
            cache.tree.digests = None
        self._caches, self._n_holders = caches, {} if len(caches) > 1 else None
        for cache in caches:
            cache.tree.digests = self
        for node in _nodes(caches):
            node.digests = b""
            found = self._extend(node, 0)
            if self._n_holders is not None:
                self._first_held(found)
        for ticket in self._followers:
            self._begin(ticket)

    def _extend(self, node: Node, n_before: int) -> list[bytes]:
        """Digests of its pages from number `n_before` on, which it has too now."""
        parent, page_size = node.parent, self._caches[0].page_size
        last = node.digests[-DIGEST_BYTES:] or (parent.digests[-DIGEST_BYTES:] if parent is not None else b"")
        found = following(last or salt_digest(node.salt), node.tokens[n_before * page_size :], page_size)
        node.digests += b"".join(found)
        return found

    def _first_held(self, digests: list[bytes]) -> list[bytes]:
        """A tree holds these now; those that none held before."""
        counts = self._n_holders
        assert counts is not None
        for digest in digests:
            counts[digest] = counts.get(digest, 0) + 1
        return [digest for digest in digests if counts[digest] == 1]

    def _last_held(self, digests: list[bytes]) -> list[bytes]:
        """A tree holds these no more; those that none holds now."""
        counts = self._n_holders
        assert counts is not None
        gone = [digest for digest in digests if counts[digest] == 1]
        for digest in digests:
            counts[digest] -= 1
        for digest in gone:
            del counts[digest]
        return gone


def _nodes(caches: Sequence[PageCache]) -> Iterator[Node]:
    """Those with pages, parents first."""
    for cache in caches:
        for root in cache.tree.roots.values():
            yield from itertools.islice(cache.tree.subtree(root), 1, None)


def _taken(entries: dict[bytes, None], n: int) -> list[bytes]:
    """The first `n`, which leave it."""
    taken = [*itertools.islice(entries, n)]
    for digest in taken:
        del entries[digest]
    return taken
