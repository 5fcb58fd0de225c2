"""Which replica gets a request: policies as plain arithmetic over counts and digests of prompts. No engine, no torch.

`PrefixRouter` guesses what each replica has in its prefix tree from what it was sent, page by page, and sends a request
to where the fewest tokens stand between it and its first one. Owns the guess; replicas are never asked.
Invariant: a digest stands for a page and all pages before it, so that equal digests mean equal beginnings.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Protocol

DECODE_TOKENS: Final = 16
"""What an open request adds to a replica's load: about the prompt tokens that a step computes in the time that one more
sequence costs it, until the request ends."""


def page_digests(tokens: Sequence[int], page_size: int) -> list[int]:
    """One for each full page of a prompt, of it and all before it."""
    digests, digest = [], 0
    for end in range(page_size, len(tokens) + 1, page_size):
        digest = hash((digest, *tokens[end - page_size : end]))
        digests.append(digest)
    return digests


class Router(Protocol):
    """See the module."""

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """The replica for request `number`, which comes now; it is open until it is told to have ended."""
        ...

    def tell(self, number: int, *, ended: bool) -> None:
        """A request has its first token, or has ended, whether or not it ever had one."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self, n_replicas: int) -> None:
        self._n = n_replicas

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """The next."""
        return number % self._n

    def tell(self, number: int, *, ended: bool) -> None:
        """Nothing is counted."""


class RandomChoice:
    """By chance."""

    def __init__(self, n_replicas: int, seed: int = 0) -> None:
        self._n, self._rng = n_replicas, random.Random(seed)

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """Any."""
        return self._rng.randrange(self._n)

    def tell(self, number: int, *, ended: bool) -> None:
        """Nothing is counted."""


class LeastLoaded:
    """Where the fewest tokens are before a first one: prompts without a token yet, and a little for each decode."""

    def __init__(self, n_replicas: int) -> None:
        self.loads = [0] * n_replicas
        """Tokens."""
        self._open: dict[int, tuple[int, int]] = {}
        """Request → its replica, and the tokens of its prompt that were not computed yet."""

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """The first of the least loaded."""
        chosen = self.loads.index(min(self.loads))
        self._load(number, chosen, len(prompt))
        return chosen

    def tell(self, number: int, *, ended: bool) -> None:
        """Its prompt is computed; an ended one is no load at all."""
        replica, n_tokens = self._open.pop(number)
        self.loads[replica] -= n_tokens + (DECODE_TOKENS if ended else 0)
        if not ended:
            self._open[number] = replica, 0

    def _load(self, number: int, replica: int, n_tokens: int) -> None:
        self._open[number] = replica, n_tokens
        self.loads[replica] += n_tokens + DECODE_TOKENS


class PrefixRouter(LeastLoaded):
    """The same, less the tokens that a replica has in its prefix tree already, as far as that can be told from here."""

    def __init__(self, n_replicas: int, page_size: int, n_pages: int) -> None:
        """n_pages: what a replica's tree holds at most."""
        super().__init__(n_replicas)
        self._page_size, self._n_pages = page_size, n_pages
        self._holders: dict[int, set[int]] = {}
        """Digest → replicas that were sent it."""
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(n_replicas)]
        """Of each replica its digests, what was unused longest first."""

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """Of the replicas that have most of the prompt, and the least loaded one, where the request waits least."""
        digests = page_digests(prompt, self._page_size)
        depths: dict[int, int] = {}
        for depth, digest in enumerate(digests, 1):
            holders = self._holders.get(digest)
            if not holders:
                break
            depths.update(dict.fromkeys(holders, depth))
        chosen = self.loads.index(min(self.loads))
        most = (len(prompt) - 1) // self._page_size  # of its last token the engine needs the logits
        fewest = self._cost(chosen, prompt, depths, most)
        for replica in depths:
            cost = self._cost(replica, prompt, depths, most)
            if cost < fewest:
                chosen, fewest = replica, cost
        self._load(number, chosen, len(prompt) - min(depths.get(chosen, 0), most) * self._page_size)
        self._keep(chosen, digests)
        return chosen

    def _cost(self, replica: int, prompt: Sequence[int], depths: dict[int, int], most: int) -> int:
        return self.loads[replica] + len(prompt) - min(depths.get(replica, 0), most) * self._page_size

    def _keep(self, replica: int, digests: list[int]) -> None:
        """The pages of a prompt are the last used, its first page the very last: leaves of a tree go before roots."""
        held = self._held[replica]
        for digest in reversed(digests):
            held[digest] = None
            held.move_to_end(digest)
            self._holders.setdefault(digest, set()).add(replica)
        while len(held) > self._n_pages:
            digest, _ = held.popitem(last=False)
            holders = self._holders[digest]
            holders.discard(replica)
            if not holders:
                del self._holders[digest]


def router_named(name: str, n_replicas: int, page_size: int, n_pages: int) -> Router:
    """'prefix', 'least-loaded', 'random' or 'round-robin'; one replica needs no choice."""
    match name:
        case _ if n_replicas == 1:
            return RoundRobin(1)
        case "prefix":
            return PrefixRouter(n_replicas, page_size, n_pages)
        case "least-loaded":
            return LeastLoaded(n_replicas)
        case "random":
            return RandomChoice(n_replicas)
    return RoundRobin(n_replicas)
