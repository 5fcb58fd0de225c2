"""Guesses of a head, EAGLE-3's or an MTP module: one layer that reads the model's own states (`config/heads`).

Owns how far the head has read each sequence. Its keys and values lie under the model's page numbers. Key p comes from
token p and the feature of token p - 1, so a page of them depends on the tokens up to its end, as the model's does, and
is shared like it. Token 0 has a feature of zeros.
Invariant: before it guesses it has read every known token with the model's features; a guess behind them reads the
head's own state, and is read again with the model's feature once it is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from quire.compute.draft.drafter import DraftContext, Guess, LateContext, Queued
from quire.compute.draft.head_steps import HeadRows, HeadSteps, QueuingSteps
from quire.compute.draft.head_tree import TreeGrowth
from quire.compute.draft.pages import FilledPages
from quire.compute.runner.tables import SlotTables

Span = tuple[int, int, int]
"""(slot, start, length)."""


class EagleDrafter:
    """`QueuingDrafter`. tables: of the model that it guesses for; most_rows: of one of the head's steps."""

    def __init__(
        self,
        steps: HeadSteps,
        tables: SlotTables,
        most_rows: int,
        growth: TreeGrowth | None = None,
        queuing: QueuingSteps | None = None,
    ) -> None:
        """growth: where guesses may be trees. queuing: `steps`, where chains of it can stay on the device."""
        self._steps, self._most_rows, self._growth, self._queuing = steps, most_rows, growth, queuing
        self._n_read = np.zeros(len(tables.tokens), np.int64)
        """Tokens of each slot that were read with the model's features."""
        self._filled = FilledPages(tables)

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """See `Drafter`."""
        self._n_read[slot] = 0
        self._filled.open(slot)

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Nothing is learnt; the keys stay with the pages."""
        self._filled.close(slot)

    def guess(self, contexts: Sequence[DraftContext]) -> Sequence[Guess]:
        """See `Drafter`: chains, and trees where they may be."""
        growth = self._growth
        branching = [] if growth is None else [i for i, one in enumerate(contexts) if one.may_branch]
        if growth is None or not branching:
            return self._chains(contexts)
        growing = [contexts[i] for i in branching]
        grown = growth.grow(growing, HeadRows.of(self._unread(growing)))
        found: dict[int, Guess] = dict(zip(branching, grown, strict=True))
        others = [i for i in range(len(contexts)) if i not in found]
        if others:
            found |= zip(others, self._chains([contexts[i] for i in others]), strict=True)
        return [found[i] for i in range(len(contexts))]

    def queue(self, contexts: Sequence[DraftContext]) -> Queued | None:
        """See `QueuingDrafter`: chains, where all of them are captured."""
        queuing, branches = self._queuing, self._growth is not None and any(one.may_branch for one in contexts)
        if queuing is None or branches or not queuing.queues(len(contexts)):
            return None
        asked = sorted(range(len(contexts)), key=lambda i: -contexts[i].most)
        spans = self._unread([contexts[i] for i in asked])
        return _queued(queuing, asked, spans, [contexts[i].most for i in asked], is_late=False)

    def follow(self, contexts: Sequence[LateContext]) -> Queued | None:
        """See `QueuingDrafter`."""
        queuing, most_new = self._queuing, max(one.most_new for one in contexts)
        if queuing is None or not queuing.queues(len(contexts)) or most_new > self._steps.most_each:
            return None
        asked = sorted(range(len(contexts)), key=lambda i: -contexts[i].most)
        latest = [contexts[i] for i in asked]
        spans = [(one.slot, one.latest + 1 - one.most_new, one.most_new) for one in latest]
        return _queued(queuing, asked, spans, [one.most for one in latest], is_late=True)

    def learn(self, slot: int, tokens: np.ndarray) -> None:
        """See `QueuingDrafter`."""
        self._filled.mark(slot, tokens[:-1])
        self._n_read[slot] = len(tokens)

    def _chains(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """All sequences together."""
        asked = sorted(range(len(contexts)), key=lambda i: -contexts[i].most)  # who goes on is in front
        spans = self._unread([contexts[i] for i in asked])
        guesses = self._steps.chain(HeadRows.of(spans), [contexts[i].most for i in asked])
        found: list[list[int]] = [[] for _ in contexts]
        for i, guess in zip(asked, guesses, strict=True):
            found[i] = guess
        return found

    def _unread(self, contexts: Sequence[DraftContext]) -> list[Span]:
        """What the head has not read of each sequence; all but the last rows of much it reads before."""
        most = max(1, min(self._steps.most_each, self._most_rows // len(contexts)))
        starts, ahead, n_ahead = list[int](), list[Span](), 0
        for context in contexts:
            slot, tokens = context.slot, context.tokens
            last = len(tokens) - 1
            start = min(int(self._n_read[slot]) or self._filled.found(slot, tokens[:last]), last)
            while last + 1 - start > most:
                length = min(self._most_rows - n_ahead, last - start)
                ahead.append((slot, start, length))
                start, n_ahead = start + length, n_ahead + length
                self._filled.mark(slot, tokens[:start])  # whoever follows is read in this step, or behind it
                if n_ahead == self._most_rows:
                    self._steps.read(HeadRows.of(ahead))
                    ahead, n_ahead = [], 0
            starts.append(start)
        if ahead:
            self._steps.read(HeadRows.of(ahead))
        for context in contexts:
            self._filled.mark(context.slot, context.tokens[:-1])
            self._n_read[context.slot] = len(context.tokens)
        return [
            (context.slot, start, len(context.tokens) - start) for context, start in zip(contexts, starts, strict=True)
        ]


def _queued(steps: QueuingSteps, asked: list[int], spans: list[Span], n_drafts: list[int], *, is_late: bool) -> Queued:
    """Chains behind spans, in the order in which they were asked for; asked: which of these each span is."""
    queued = steps.queue(HeadRows.of(spans), n_drafts, is_late=is_late)
    order = sorted(range(len(asked)), key=asked.__getitem__)
    lengths, at = ([values[i] for i in order] for values in (queued.lengths, queued.at))
    return dataclasses.replace(queued, lengths=lengths, at=at)
