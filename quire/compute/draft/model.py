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
from quire.compute.runner.runner import Runner
from quire.core.plan import Spans, StepPlan


class ModelDrafter:
    """`Drafter`. runner: of the small model, on the large one's tables, every slot open and greedy. most_rows: of one
    of its steps."""

    def __init__(self, runner: Runner, most_rows: int) -> None:
        self._runner, self._tables, self._most_rows = runner, runner.tables, most_rows
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
        """See `Drafter`: one step for each place, all sequences together."""
        self._read([(context.slot, context.tokens) for context in contexts])
        found: list[list[int]] = [[] for _ in contexts]
        ends = [len(context.tokens) for context in contexts]
        for place in range(max(context.most for context in contexts)):
            asked = [i for i, context in enumerate(contexts) if place < context.most]
            starts = [int(self._n_read[contexts[i].slot]) if not place else ends[i] + place - 1 for i in asked]
            spans = [(contexts[i].slot, start, ends[i] + place - start) for i, start in zip(asked, starts, strict=True)]
            for i, token in zip(asked, self._run(spans, wants=True), strict=True):
                found[i].append(token)
        for context, end, drafts in zip(contexts, ends, found, strict=True):
            self._guessed[context.slot] = end, drafts
        return found

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
        slots, starts, lengths = (list(column) for column in zip(*spans, strict=True))
        plan = StepPlan(0, Spans(slots, starts, lengths, [0] * len(spans), [wants] * len(spans)), n_tokens=sum(lengths))
        return self._runner.launch(plan).result().tokens
