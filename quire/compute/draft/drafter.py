"""Drafters: guesses how sequences go on. A wrong guess costs time, never a token: each is verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from quire.compute.device.device import Download


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTree:
    """Guesses of which several may follow one token; at least one."""

    tokens: list[int]
    parents: list[int]
    """Of each the place of the one before it, which is less than its own; -1: the known token. Children of one place
    differ. Where the likeliest path stands first, and right, nothing has to be moved."""

    @property
    def paths(self) -> list[int]:
        """Of each the bits of itself and of those above it."""
        found: list[int] = []
        for node, parent in enumerate(self.parents):
            found.append((found[parent] if parent >= 0 else 0) | 1 << node)
        return found


Guess = list[int] | DraftTree
"""A list is a chain: each follows the one before it."""


def straightest(tokens: Sequence[int], parents: Sequence[int]) -> Guess:
    """The guess of nodes in any order in which parents, and better children of one place, come first: each first child
    directly behind its parent, so that the likeliest path stands first."""
    below: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for node in reversed(range(len(tokens))):
        below[parents[node]].append(node)  # those of the known token, -1, are the last list
    order, stack, place = list[int](), list(below[-1]), {-1: -1}
    while stack:
        node = stack.pop()
        place[node] = len(order)
        order.append(node)
        stack += below[node]
    found = DraftTree([tokens[node] for node in order], [place[parents[node]] for node in order])
    return found.tokens if found.parents == list(range(-1, len(order) - 1)) else found


@dataclasses.dataclass(frozen=True, slots=True)
class DraftContext:
    """A sequence whose next tokens are to be guessed."""

    slot: int
    tokens: np.ndarray
    """int32 [length], all of the sequence, prompt and output. Not to be changed."""
    most: int
    """Drafts that its span has room for, at least 1."""
    may_branch: bool = False
    """The guess may be a tree."""


class Drafter(Protocol):
    """Asked in each step that verifies drafts, when it begins and all tokens are known."""

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """Another sequence is in this slot. What it says is for sequences with the same salt only."""
        ...

    def guess(self, contexts: Sequence[DraftContext]) -> Sequence[Guess]:
        """For each up to `most` token ids that may follow. Fewer, or none, make its span shorter."""
        ...

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """The sequence leaves; tokens: int32 [length], what is known of it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """Chains that the device is making."""

    lengths: list[int]
    """Guesses of each."""
    at: list[int]
    """Where the first one will be in `found`."""
    stride: int
    """How far behind it the next one is, and so on."""
    found: torch.Tensor
    """int32, on the device: overwritten by the next chains."""
    arriving: Download
    """The same, up to the last guess."""

    def read(self) -> list[list[int]]:
        """Wait for them."""
        flat = self.arriving.wait()[0].tolist()
        return [flat[at : at + n * self.stride : self.stride] for n, at in zip(self.lengths, self.at, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class LateContext:
    """A sequence of whose newest tokens only the device knows how many there are."""

    slot: int
    latest: int
    """Where the newest of them stands at the latest."""
    most_new: int
    """Tokens since the guesses before, at most; at least one is."""
    most: int
    """As in `DraftContext`."""


@runtime_checkable
class QueuingDrafter(Drafter, Protocol):
    """One whose guesses can stay on the device."""

    def queue(self, contexts: Sequence[DraftContext]) -> Queued | None:
        """As `guess`, at once, without a wait. None, and nothing is done, where it cannot."""
        ...

    def follow(self, contexts: Sequence[LateContext]) -> Queued | None:
        """The same for sequences that the newest call has guessed for, when the device knows which of its guesses were
        kept (`SlotTables.ends`)."""
        ...

    def learn(self, slot: int, tokens: np.ndarray) -> None:
        """What `follow` was not told: the tokens, int32 [length], on which its guesses for the slot stood."""
        ...


class SequenceDrafter(Protocol):
    """One that looks at each sequence alone; otherwise as `Drafter`."""

    def open(self, slot: int, salt: str, prompt_len: int) -> None: ...

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        """Up to n token ids that may follow `tokens`, int32 [length]."""
        ...

    def close(self, slot: int, tokens: np.ndarray) -> None: ...


class EachSequence:
    """A `Drafter` that asks a `SequenceDrafter` for one sequence after another."""

    def __init__(self, drafter: SequenceDrafter, branch: Callable[[int, np.ndarray, int], Guess] | None = None) -> None:
        """branch: in place of its `guess` where the guess may be a tree."""
        self._drafter, self._branch = drafter, branch

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """See `Drafter`."""
        self._drafter.open(slot, salt, prompt_len)

    def guess(self, contexts: Sequence[DraftContext]) -> list[Guess]:
        """See `Drafter`."""
        return [
            self._drafter.guess(one.slot, one.tokens, one.most)[: one.most]
            if self._branch is None or not one.may_branch
            else self._branch(one.slot, one.tokens, one.most)
            for one in contexts
        ]

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """See `Drafter`."""
        self._drafter.close(slot, tokens)
