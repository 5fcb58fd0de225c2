"""How far the sequence in each slot has come, where drafts are verified: known here a step before control knows it.

Owns the true starts of spans, the tokens that drafts are (decision 0012), and the host's copy of tokens where a device
keeps its own. Does not own guesses (`compute/draft`) nor how a token is chosen.
Invariants: while a plan that verified drafts is not known to control, a slot's length here is that of the tokens whose
keys its spans have computed and kept; otherwise the plan says it, and nothing here is read. Before a plan is settled,
`learn` and `keep` have heard of every step before it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.compute.draft.drafter import DraftContext, Drafter, DraftTree
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.step import Guesses
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.trees import Walk, walk
from quire.compute.sample.sampler import split_faults
from quire.core.plan import SlotOpen, Spans, StepPlan
from quire.core.result import Fault, StepResult, StepTimings

NO_DRAFT = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What of a step's sampled rows counts."""

    n_new: list[int]
    """Tokens of each span that wants one; 0 if the first of its rows failed."""
    rows: list[int]
    """The rows that have them, and those that failed first."""
    n_drafted: list[int]
    """As in `StepResult`."""
    walks: list[Walk]
    """Of the spans that were trees."""

    def split_faults(
        self, token_ids: list[int], statuses: list[int], slots: np.ndarray
    ) -> tuple[list[int], list[int], list[Fault], dict[int, int]]:
        """As `sampler.split_faults` of all sampled rows, with the number of tokens up to each row that counts."""
        ids, codes = [token_ids[row] for row in self.rows], [statuses[row] for row in self.rows]
        tokens, each, faults = split_faults(ids, codes, slots[self.rows])
        return tokens, self.n_new, faults, dict(zip(self.rows, itertools.accumulate(each), strict=True))

    def result(
        self, step: int, token_ids: list[int], statuses: list[int], slots: np.ndarray, timings: StepTimings
    ) -> StepResult:
        """Of a step of which nothing but tokens is wanted, by all its sampled rows."""
        tokens, n_new, faults, _ = self.split_faults(token_ids, statuses, slots)
        return StepResult(step, tokens, n_new, self.n_drafted, faults=faults, timings=timings)


class Brancher(Protocol):
    """Where drafts may be trees."""

    def may_branch(self, slot: int) -> bool:
        """Whether those of this sequence may be one."""
        ...

    def straighten(self, walks: Sequence[Walk]) -> None:
        """Keys, values and features of what was kept go to their positions, and the device's token table learns the
        tokens, if the host does not see it."""
        ...


class SlotLengths:
    """See the module."""

    def __init__(
        self, tables: SlotTables, drafter: Drafter, brancher: Brancher | None = None, chance: float | None = None
    ) -> None:
        """brancher: where drafts may be trees. chance: with which drafts count; None: if they are the token that is
        chosen."""
        self._tables, self._drafter = tables, drafter
        self._tokens = tables.tokens.numpy() if self.is_live else np.zeros(tuple(tables.tokens.shape), np.int32)
        self._n_opened = np.zeros(len(self._tokens), np.int64)
        """How many sequences each slot has had."""
        self._brancher, self._trees = brancher, dict[int, DraftTree]()
        """The newest step's trees, by span."""
        self._chance, self._source = chance, random.Random(0)
        self._lengths: dict[int, int] = {}
        """Of slots where the plan's starts are not known to be true."""
        self._drafts: list[int] = []
        """At the places of the newest step's sampled rows."""
        self._n_drafted: list[int] = []
        self._open: set[int] = set()

    @property
    def is_live(self) -> bool:
        """The host sees the token table itself: a step's tokens are there when it ends."""
        return self._tables.is_shared

    def open(self, opened: SlotOpen) -> None:
        """Another sequence: its first span says where it begins."""
        self._lengths.pop(opened.slot, None)
        self._n_opened[opened.slot] += 1
        if not self.is_live:
            self._tokens[opened.slot, : len(opened.token_ids)] = opened.token_ids
        self._open.add(opened.slot)
        self._drafter.open(opened.slot, opened.salt, opened.prompt_len)

    def close(self, slot: int, n_known: int) -> None:
        """Its sequence leaves, of which control knows so many tokens; it may not have been open."""
        if slot in self._open:
            self._open.remove(slot)
            self._drafter.close(slot, self._tokens[slot, :n_known])

    def sequences(self, slots: np.ndarray) -> np.ndarray:
        """int64 [m]: which of its sequences each slot has now, for `learn`."""
        found: np.ndarray = self._n_opened[slots]
        return found

    def learn(self, batch: FlatBatch, sequences: np.ndarray, token_ids: np.ndarray) -> None:
        """The tokens of a step's sampled rows, int32 [m]; those of sequences that left meanwhile are passed over."""
        if self.is_live:
            return
        slots, positions = batch.sampled_slots, batch.sampled_positions
        is_there = self._n_opened[slots] == sequences
        self._tokens[slots[is_there], positions[is_there]] = token_ids[is_there]

    def straighten(self, walks: Sequence[Walk], sequences: np.ndarray) -> None:
        """What was kept of trees goes where it belongs, in the token table and in the pages; `learn` has been told of
        the step. What belongs to sequences that left meanwhile stays: their pages may be others'."""
        there = [one for one in walks if one.slot in self._open and self._n_opened[one.slot] == sequences[one.at]]
        if not there or self._brancher is None:
            return
        for one in there:
            self._tokens[one.slot, one.start + 1 : one.start + 1 + len(one.tokens)] = one.tokens
        self._brancher.straighten(there)

    def settle(
        self, plan: StepPlan, *, may_branch: bool = False
    ) -> tuple[StepPlan, Guesses | None, Mapping[int, DraftTree]]:
        """The plan with true starts, and with as many drafts as there are guesses; those that the device's token table
        lacks; and which spans are trees, if these may be."""
        spans = plan.spans
        if plan.knows_starts:
            self._lengths.clear()
        slots, n_drafts = spans.slots, spans.n_drafts
        starts = [self._lengths.get(slot, latest) for slot, latest in zip(slots, spans.starts, strict=True)]
        brancher = self._brancher if may_branch else None
        chains = {*plan.masked, *(i for i, _, _ in plan.foretold)}
        contexts = {}
        for i in (i for i, n in enumerate(n_drafts) if n):
            may = brancher is not None and i not in chains and brancher.may_branch(slots[i])
            contexts[i] = DraftContext(slots[i], self._tokens[slots[i], : starts[i] + 1], n_drafts[i], may)
        sure = {i: _sure(contexts[i], at, tokens) for i, at, tokens in plan.foretold}
        asking = {i: context for i, context in contexts.items() if not sure.get(i)}
        found = dict(zip(asking, self._drafter.guess(list(asking.values())), strict=True)) if asking else {}
        self._trees = {i: guess for i, guess in found.items() if isinstance(guess, DraftTree)}
        chosen = {i: found[i] if i in found else sure[i] for i in contexts}
        guesses = {i: guess.tokens if isinstance(guess, DraftTree) else guess for i, guess in chosen.items()}
        self._n_drafted = [len(guess) for guess in guesses.values()]
        lengths, made, self._drafts = list(spans.lengths), [0] * len(slots), []
        for i, wants in enumerate(spans.wants):
            guess = guesses.get(i, [])
            if n_drafts[i]:
                self._tokens[slots[i], starts[i] + 1 : starts[i] + 1 + len(guess)] = guess
                lengths[i] += len(guess) - n_drafts[i]
                made[i] = len(guess)
            self._drafts += [*guess, NO_DRAFT] if wants else []
        true = Spans(slots, starts, lengths, made, spans.wants)
        lacking = None if self.is_live or not any(made) else _guesses(true, guesses)
        return msgspec.structs.replace(plan, spans=true, n_tokens=sum(lengths)), lacking, self._trees

    def drafts_of(self, plan: StepPlan) -> list[list[int]]:
        """Of each masked span of the plan that was settled last."""
        spans = plan.spans
        n_rows = [1 + n if wants else 0 for n, wants in zip(spans.n_drafts, spans.wants, strict=True)]
        first = [0, *itertools.accumulate(n_rows)]
        return [self._drafts[first[i] : first[i + 1] - 1] for i in plan.masked]

    def keep(self, spans: Spans, token_ids: list[int], statuses: list[int]) -> Kept:
        """What counts: of each span the tokens up to the first that is not the draft at its place, and none from a row
        that failed on. spans: of the plan that was settled last; token_ids, statuses: of its sampled rows."""
        kept, at = Kept([], [], self._n_drafted, []), 0
        columns = zip(spans.slots, spans.starts, spans.lengths, spans.wants, spans.n_drafts, strict=True)
        for i, (slot, start, length, wants, n_drafts) in enumerate(columns):
            self._lengths[slot] = start + length
            if i in self._trees:
                rows = slice(at, at + 1 + n_drafts)
                n_new = self._keep_tree(kept, Walk(at, slot, start, *self._walk(i, token_ids[rows], statuses[rows])))
                at += 1 + n_drafts
                self._lengths[slot] += n_new - 1 - n_drafts
            elif wants:
                row = at
                while self._is_right(row, token_ids[row]) and not statuses[row]:
                    row += 1
                n_new = row - at + (not statuses[row])
                kept.n_new.append(n_new)
                kept.rows.extend(range(at, at + max(1, n_new)))
                at += 1 + n_drafts
                self._lengths[slot] += n_new - 1 - n_drafts
        return kept

    def _walk(self, span: int, token_ids: list[int], statuses: list[int]) -> tuple[list[int], list[int]]:
        """Nodes that are kept, and the tokens chosen behind the root and them, but for one that failed at the end."""
        nodes = walk(self._trees[span], token_ids, statuses, self._counts)
        rows = [0, *(1 + node for node in nodes)]
        if statuses[rows[-1]]:
            rows.pop()
        return nodes[: max(0, len(rows) - 1)], [token_ids[row] for row in rows]

    @staticmethod
    def _keep_tree(kept: Kept, way: Walk) -> int:
        """Tokens of the span."""
        kept.n_new.append(len(way.tokens))
        kept.rows.extend([way.at, *(way.at + 1 + node for node in way.nodes)])
        kept.walks.append(way)
        return len(way.tokens)

    def _counts(self, draft: int, token: int) -> bool:
        """Whether a draft in the place of a token is kept."""
        return draft == token if self._chance is None else self._source.random() < self._chance

    def _is_right(self, row: int, token: int) -> bool:
        draft = self._drafts[row]
        return draft != NO_DRAFT and self._counts(draft, token)


def _sure(context: DraftContext, at: int, tokens: list[int]) -> list[int]:
    """Of the tokens that must stand from position `at` on those that are lacking; none if the sequence says others."""
    known = context.tokens[at:].tolist()
    return tokens[len(known) :][: context.most] if known and known == tokens[: len(known)] else []


def _guesses(spans: Spans, guesses: dict[int, list[int]]) -> Guesses:
    """Drafts by span, and where they stand."""
    first = [0, *itertools.accumulate(spans.lengths)]
    rows, places = list[int](), list[tuple[int, int, int]]()
    for i, guess in guesses.items():
        start, known = spans.starts[i], spans.lengths[i] - len(guess)
        rows += range(first[i] + known, first[i + 1])
        places += [(spans.slots[i], start + known + k, token) for k, token in enumerate(guess)]
    return Guesses(np.array(rows, np.int64), np.array(places, np.int64).T)
