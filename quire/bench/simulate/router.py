"""Which replica gets a request: the server's own choice (`engine/replicas/chooser.py`), and plain ones beside it.

Owns the plain ones, for comparison. Does not own the server's rule, nor what a replica has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Protocol

from quire.core.events import PrefixUpdate
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.replicas.chooser import Chooser

DECODE_TOKENS: Final = 16
"""What an open request adds to a replica's load: about the prompt tokens that a step computes in the time that one more
sequence costs it, until the request ends."""


class Router(Protocol):
    """See the module."""

    @property
    def follows(self) -> bool:
        """It wants to hear what the prefix trees of replicas hold."""
        ...

    def hear(self, index: int, update: PrefixUpdate) -> None:
        """What a replica says of that."""
        ...

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """The replica for request `number`, which comes now; it is open until it is told to have ended."""
        ...

    def tell(self, number: int, *, ended: bool) -> None:
        """A request has its first token, or has ended, whether or not it ever had one."""
        ...


class Unasking:
    """Whoever does not ask what replicas hold."""

    follows = False

    def hear(self, index: int, update: PrefixUpdate) -> None:
        """Nobody asked."""


class RoundRobin(Unasking):
    """One after the other."""

    def __init__(self, n_replicas: int) -> None:
        self._n = n_replicas

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """The next."""
        return number % self._n

    def tell(self, number: int, *, ended: bool) -> None:
        """Nothing is counted."""


class RandomChoice(Unasking):
    """By chance."""

    def __init__(self, n_replicas: int, seed: int = 0) -> None:
        self._n, self._rng = n_replicas, random.Random(seed)

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """Any."""
        return self._rng.randrange(self._n)

    def tell(self, number: int, *, ended: bool) -> None:
        """Nothing is counted."""


class LeastLoaded(Unasking):
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


class ServerRouter:
    """The one of `quire serve --replicas`, which knows requests and replicas by name."""

    follows = True

    def __init__(self, n_replicas: int, page_size: int, n_pages: int, n_slots: int) -> None:
        self._chooser, self._names = Chooser(), [str(index) for index in range(n_replicas)]
        for name in self._names:
            self._chooser.introduce(name, n_slots, n_pages, page_size)
        self._params = SamplingParams()

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        """The first of its ranking, which has a place for every request."""
        wire_id = str(number)
        self._chooser.expect(wire_id, Request(
            request_id=wire_id, prompt_token_ids=list(prompt), params=self._params, max_tokens=1, seed=0
        ))  # fmt: skip
        chosen = self._chooser.rank(wire_id, self._names)[0]
        self._chooser.placed(wire_id, chosen)
        return int(chosen)

    def hear(self, index: int, update: PrefixUpdate) -> None:
        """It goes by that."""
        self._chooser.hear(self._names[index], update)

    def tell(self, number: int, *, ended: bool) -> None:
        """First tokens mean nothing to it."""
        if ended:
            self._chooser.done(str(number))

    def n_open(self, index: int) -> int:
        """Sequences that were sent to a replica and have not ended."""
        return self._chooser.n_open(str(index))


def router_named(name: str, n_replicas: int, page_size: int, n_pages: int, n_slots: int) -> Router:
    """'prefix' (the server's), 'least-loaded', 'random' or 'round-robin'; one replica needs no choice."""
    match name:
        case _ if n_replicas == 1:
            return RoundRobin(1)
        case "prefix":
            return ServerRouter(n_replicas, page_size, n_pages, n_slots)
        case "least-loaded":
            return LeastLoaded(n_replicas)
        case "random":
            return RandomChoice(n_replicas)
    return RoundRobin(n_replicas)
