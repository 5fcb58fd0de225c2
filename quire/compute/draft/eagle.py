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
import torch

from quire.compute.draft.drafter import DraftContext, Guess
from quire.compute.draft.head import Head
from quire.compute.draft.head_steps import HeadRows, HeadSteps
from quire.compute.draft.head_tree import grow
from quire.compute.draft.pages import FilledPages
from quire.compute.runner.features import Features
from quire.compute.runner.tables import SlotTables
from quire.config.token_tree import TreeShape


class EagleDrafter:
    """`Drafter`. features: of the model's pages, to which tables belong; most_rows: of one of the head's steps."""

    def __init__(
        self,
        head: Head,
        steps: HeadSteps,
        features: Features,
        tables: SlotTables,
        most_rows: int,
        tree: TreeShape | None = None,
    ) -> None:
        self._token_ids, self._model_norm = head.token_ids, head.model_norm
        self._steps, self._features, self._tree = steps, features, tree
        self._tables, self._most_rows = tables, most_rows
        self._tokens = tables.tokens.numpy()
        self._n_read = np.zeros(len(self._tokens), np.int64)
        """Tokens of each slot that were read with the model's features."""
        self._filled = FilledPages(tables)

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """See `Drafter`."""
        self._n_read[slot] = 0
        self._filled.open(slot)

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Nothing is learnt; the keys stay with the pages."""
        self._filled.close(slot)

    @torch.inference_mode()
    def guess(self, contexts: Sequence[DraftContext]) -> list[Guess]:
        """See `Drafter`: chains, and trees where they may be."""
        if self._tree is None:
            return [*self._chains(contexts)]
        asked = list(enumerate(contexts))
        branching, others = ([i for i, one in asked if one.may_branch is may] for may in (True, False))
        found: dict[int, Guess] = {}
        if branching:
            found |= zip(branching, self._trees([contexts[i] for i in branching], self._tree), strict=True)
        if others:
            found |= zip(others, self._chains([contexts[i] for i in others]), strict=True)
        return [found[i] for i, _ in asked]

    def _trees(self, contexts: Sequence[DraftContext], shape: TreeShape) -> list[Guess]:
        """One step of the head for each level."""
        rows = self._first_rows(contexts)
        return grow(contexts, rows, self._steps, self._tokens, self._token_ids, shape)

    def _chains(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """One step of the head for each place, all sequences together."""
        found: list[list[int]] = [[] for _ in contexts]
        asked = sorted(range(len(contexts)), key=lambda i: -contexts[i].most)  # who goes on is in front
        best = self._best(self._first_rows([contexts[i] for i in asked]))
        ends = np.array([len(contexts[i].tokens) for i in asked], np.int64)
        slots = np.array([contexts[i].slot for i in asked], np.int64)
        rows: HeadRows | None = None
        for place in range(1, contexts[asked[0]].most + 1):
            for i, token in zip(asked, best.tolist(), strict=True):
                found[i].append(token)
            n_before, asked = len(asked), [i for i in asked if place < contexts[i].most]
            n = len(asked)
            if not n:
                break
            self._tokens[slots[:n], ends[:n] + place - 1] = best[:n]
            if rows is None or n < n_before:
                rows = HeadRows.of([(int(slots[i]), int(ends[i]) + place - 1, 1) for i in range(n)], wants=True)
            else:
                rows.advance()
            best = self._best(rows)
        return found

    def _best(self, rows: HeadRows) -> np.ndarray:
        """int32 [m]: the model's ids of the guesses behind the rows wanted."""
        best: np.ndarray = self._token_ids[self._steps.step(rows)]
        return best

    def _first_rows(self, contexts: Sequence[DraftContext]) -> HeadRows:
        """What the head has not read of the sequences, features in place; all but the last rows of much it reads."""
        most = max(1, self._most_rows // len(contexts))
        spans = []
        for context in contexts:
            slot, tokens = context.slot, context.tokens
            n_known = len(tokens)
            start = int(self._n_read[slot]) or self._filled.found(slot, tokens[: n_known - 1])
            start = min(start, n_known - 1)
            while n_known - start > most:
                length = min(self._most_rows, n_known - start - 1)
                self._steps.step(self._with_features([(slot, start, length)], wants=False))
                start += length
            self._filled.mark(slot, tokens[: n_known - 1])
            self._n_read[slot] = n_known
            spans.append((slot, start, n_known - start))
        return self._with_features(spans, wants=True)

    def _with_features(self, spans: Sequence[tuple[int, int, int]], *, wants: bool) -> HeadRows:
        """The rows of (slot, start, length), the features before their tokens among the states of the next step."""
        rows = HeadRows.of(spans, wants=wants)
        before = np.maximum(rows.positions - 1, 0)
        locs = self._tables.cache_locs(rows.slots, before)[0]
        states = self._steps.states[: len(locs)]
        self._features.read(torch.from_numpy(locs), states)
        if self._model_norm is not None:
            states.copy_(self._model_norm(states))
        if not rows.positions.all():
            states[torch.from_numpy(rows.positions == 0)] = 0
        return rows
