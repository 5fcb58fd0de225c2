"""A follower of prefix trees, and the slow oracle of what it should know."""

from __future__ import annotations

import array
import hashlib

from quire.control.cache import PageCache
from quire.control.digests import cut_up
from quire.control.node import Node
from quire.control.scheduler import Scheduler
from quire.control.tree_digests import TreeDigests
from quire.core.events import PrefixUpdate


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def held(*caches: PageCache) -> set[bytes]:
    """The oracle: every path of the trees, hashed from its beginning."""
    found, size = set[bytes](), caches[0].page_size

    def walk(node: Node, last: bytes) -> None:
        for start in range(0, len(node.tokens), size):
            last = digest(last + array.array("I", node.tokens[start : start + size]).tobytes())
            found.add(last)
        for child in node.children.values():
            walk(child, last)

    for one in caches:
        for salt, root in one.tree.roots.items():
            walk(root, digest(salt.encode()))
    return found


class Told:
    """What a follower knows."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.number = 0
        self.n_bytes = 0

    def take(self, update: PrefixUpdate) -> None:
        if update.number == 0:
            self.digests, self.number = set(), 0
        assert update.number == self.number
        self.number += 1
        self.n_bytes = len(update.removed) + len(update.added)
        removed, added = cut_up(update.removed), cut_up(update.added)
        assert self.digests.issuperset(removed) and not self.digests.intersection(added), "nothing is told twice"
        self.digests = self.digests - {*removed} | {*added}


class Follower:
    """Follows a scheduler's trees, also when it begins anew after a failure."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._digests, self._told = TreeDigests(), Told()
        self._digests.follow(1, scheduler.live.caches)

    def check(self, scheduler: Scheduler) -> None:
        caches = scheduler.live.caches
        for _, update in self._digests.updates(caches):
            self._told.take(update)
        assert self._told.digests == held(*caches), "a follower does not know what the prefix trees hold"
