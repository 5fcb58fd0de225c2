"""Guesses of a head, EAGLE-3's or an MTP module: one layer that reads the model's own states (`config/heads`).

Owns how far the head has read each sequence. Its keys and values lie under the model's page numbers. Key p comes from
token p and the feature of token p - 1, so a page of them depends on the tokens up to its end, as the model's does, and
is shared like it. Token 0 has a feature of zeros.
Invariant: before it guesses it has read every known token with the model's features; a guess behind them reads the
head's own state, and is read again with the model's feature once it is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.compute.draft.drafter import DraftContext
from quire.compute.draft.head_steps import HeadRows, HeadSteps
from quire.compute.draft.pages import FilledPages
from quire.compute.runner.tables import SlotTables


class EagleDrafter:
    """`Drafter`. tables: of the model; most_rows: of one of the head's steps."""

    def __init__(self, steps: HeadSteps, tables: SlotTables, most_rows: int) -> None:
        self._steps, self._most_rows = steps, most_rows
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

    def guess(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`: the head goes through all sequences together."""
        order = sorted(range(len(contexts)), key=lambda i: -contexts[i].most)  # who goes on is in front
        asked = [contexts[i] for i in order]
        rows, n_places = self._first_rows(asked), np.array([context.most for context in asked], np.int32)
        found = self._steps.guess(rows, n_places).T.tolist()
        guesses = dict(zip(order, found, strict=True))
        return [guesses[i][: context.most] for i, context in enumerate(contexts)]

    def _first_rows(self, contexts: Sequence[DraftContext]) -> HeadRows:
        """What the head has not read of the sequences; all but the last rows of much it reads."""
        most = max(1, self._most_rows // len(contexts))
        spans = []
        for context in contexts:
            slot, tokens = context.slot, context.tokens
            n_known = len(tokens)
            start = int(self._n_read[slot]) or self._filled.found(slot, tokens[: n_known - 1])
            start = min(start, n_known - 1)
            while n_known - start > most:
                length = min(self._most_rows, n_known - start - 1)
                self._steps.read(HeadRows.of([(slot, start, length)], wants=False))
                start += length
            self._filled.mark(slot, tokens[: n_known - 1])
            self._n_read[slot] = n_known
            spans.append((slot, start, n_known - start))
        return HeadRows.of(spans, wants=True)
