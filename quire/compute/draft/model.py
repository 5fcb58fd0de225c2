"""A small model that guesses for a large one: greedy tokens of a decoder with the same ids (Leviathan et al. 2023).

Owns how far it has read each sequence. It has keys and values of its own under the same page numbers (`pages.py`), so
control counts one page for both; the token table and page tables are the large model's.
Invariant: what it lacks it reads before it guesses, so it may be asked in any step, and after any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.compute.draft.drafter import DraftContext
from quire.compute.draft.pages import FilledPages
from quire.compute.forward.fused import FusedForward
from quire.compute.runner.runner import Runner
from quire.core.plan import Spans, StepPlan


class ModelDrafter:
    """`Drafter`. runner: of the small model, on the large one's tables, every slot open and greedy. most_rows: of one
    of its steps. native: makes a chain of tokens in one call, where that can be."""

    def __init__(self, runner: Runner, most_rows: int, native: FusedForward | None) -> None:
        self._runner, self._tables, self._most_rows, self._native = runner, runner.tables, most_rows, native
        n_slots = len(self._tables.tokens)
        self._n_read = np.zeros(n_slots, np.int64)
        """Tokens of each slot whose keys are there when a guess begins."""
        self._filled = FilledPages(self._tables)
        self._guessed: dict[int, tuple[int, list[int]]] = {}
        """Slot → where its newest drafts begin, and these."""

    def open(self, slot: int, salt: str, prompt_len: int) -> None:
        """See `Drafter`."""
        self._n_read[slot] = 0
        self._filled.open(slot)
        self._guessed.pop(slot, None)

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """Nothing is learnt; the keys stay with the pages."""
        self._filled.close(slot)

    def guess(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Drafter`: the model goes through all sequences together."""
        self._read([(context.slot, context.tokens) for context in contexts])
        order = sorted(range(len(contexts)), key=lambda i: -contexts[i].most)  # who goes on is in front
        asked = [contexts[i] for i in order]
        starts = [int(self._n_read[one.slot]) for one in asked]
        spans = [(one.slot, start, len(one.tokens) - start) for one, start in zip(asked, starts, strict=True)]
        found: list[list[int]] = [[]] * len(contexts)
        for i, guesses in zip(order, self._chains(spans, [one.most for one in asked]), strict=True):
            found[i] = guesses[: contexts[i].most]
            self._guessed[contexts[i].slot] = len(contexts[i].tokens), found[i]
        return found

    def _chains(self, spans: Sequence[tuple[int, int, int]], n_places: list[int]) -> list[list[int]]:
        """At least n_places[i], not rising, tokens behind each of (slot, start, length), each from the one before."""
        if self._native is not None:
            found: list[list[int]] = self._native.chain(_spans(spans, wants=True), n_places).T.tolist()
            return found
        chains: list[list[int]] = [[] for _ in spans]
        for place in range(n_places[0]):
            for chain, token in zip(chains, self._run(spans, wants=True), strict=False):
                chain.append(token)
            n = sum(most > place + 1 for most in n_places)
            spans = [(slot, start + length, 1) for slot, start, length in spans[:n]]
        return chains

    def _read(self, sequences: Sequence[tuple[int, np.ndarray]]) -> None:
        """Read what it lacks of sequences, but for the last tokens, which the first guess reads."""
        for slot, tokens in sequences:
            last = len(tokens) - 1
            start = min(self._kept(slot, tokens) or self._filled.found(slot, tokens[:last]), last)
            while last - start >= max(1, self._most_rows // len(sequences)):
                length = min(self._most_rows, last - start)
                self._run([(slot, start, length)], wants=False)
                start += length
            self._n_read[slot] = start
            self._filled.mark(slot, tokens[:last])

    def _kept(self, slot: int, tokens: np.ndarray) -> int:
        """Tokens whose keys it has: those before the newest drafts, and those of the drafts that became tokens. The
        last draft was never read."""
        if slot not in self._guessed:
            return 0
        end, drafts = self._guessed[slot]
        n = 0
        while n < len(drafts) - 1 and end + n < len(tokens) and tokens[end + n] == drafts[n]:
            n += 1
        return end + n

    def _run(self, spans: Sequence[tuple[int, int, int]], *, wants: bool) -> list[int]:
        """A step of (slot, start, length); the tokens behind them, which are in the token table then, if wanted."""
        plan = StepPlan(0, _spans(spans, wants=wants), n_tokens=sum(length for _, _, length in spans))
        return self._runner.launch(plan).result().tokens


def _spans(spans: Sequence[tuple[int, int, int]], *, wants: bool) -> Spans:
    """Of (slot, start, length)."""
    slots, starts, lengths = (list(column) for column in zip(*spans, strict=True))
    return Spans(slots, starts, lengths, [0] * len(spans), [wants] * len(spans))
