"""How far the sequence in each slot has come, where drafts are verified: known here a step before control knows it.

Owns the true starts of spans and the tokens that drafts are (decision 0012). Does not own the host's copy of texts
(`host_tokens.py`), guesses (`compute/draft`) nor how a token is chosen.
Invariants: while a plan that verified drafts is not known to control, a slot's length here is that of the tokens whose
keys its spans have computed and kept; otherwise the plan says it, and nothing here is read. Before a plan is settled,
`learn` and `keep` have heard of every step before it; before one that follows they need not: then the device alone
knows where its spans begin.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch

from quire.compute.draft.drafter import DraftContext, Drafter, DraftTree, LateContext, Queued, QueuingDrafter
from quire.compute.runner import standing
from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.host_tokens import HostTokens
from quire.compute.runner.settled import Kept, Settled
from quire.compute.runner.step import Guesses
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.trees import Walk, walk
from quire.compute.sample.sampler import Sampled
from quire.core.plan import SlotOpen, SpanDrafts, Spans, StepPlan

NO_DRAFT = -1


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
        self._tables, self._drafter, self.tokens = tables, drafter, HostTokens(tables)
        self._queuing = drafter if isinstance(drafter, QueuingDrafter) else None
        self._brancher = brancher
        self._chance, self._source = chance, random.Random(0)
        self._lengths: dict[int, int] = {}
        """Of slots where the plan's starts are not known to be true."""
        self._newest: Settled | None = None
        """The newest step with drafts, if its guesses are on the device."""
        self._open: set[int] = set()

    def open(self, opened: SlotOpen) -> None:
        """Another sequence: its first span says where it begins."""
        self._lengths.pop(opened.slot, None)
        self.tokens.open(opened.slot, opened.token_ids)
        self._open.add(opened.slot)
        self._drafter.open(opened.slot, opened.salt, opened.prompt_len)

    def close(self, slot: int, n_known: int) -> None:
        """Its sequence leaves, of which control knows so many tokens; it may not have been open."""
        if slot in self._open:
            self._open.remove(slot)
            self._drafter.close(slot, self.tokens.newest[slot, :n_known])

    def learn(self, batch: FlatBatch, n_opened: int, token_ids: torch.Tensor, settled: Settled) -> None:
        """The tokens of a settled step's sampled rows, int32 [m] on the host; it was kept. Those of sequences whose
        slots have others meanwhile are passed over. n_opened: when it was launched."""
        if self.tokens.is_live:
            return
        spans, follows, positions = settled.plan.spans, settled.before is not None, batch.sampled_positions
        if follows:
            behind = np.array(spans.starts) - settled.starts
            positions = positions - np.repeat(behind, spans.lengths)
        self.tokens.add(batch.sampled_slots, positions, token_ids, n_opened)
        if follows:
            assert self._queuing is not None
            tokens = self.tokens.newest
            for slot, start in zip(spans.slots, settled.starts, strict=True):
                if slot in self._open and self.tokens.is_there(slot, n_opened):
                    self._queuing.learn(slot, tokens[slot, : start + 1])
            settled.before = None

    def straighten(self, walks: Sequence[Walk], n_opened: int) -> None:
        """What was kept of trees goes where it belongs, in the token table and in the pages; `learn` has been told of
        the step. What belongs to sequences that left meanwhile stays: their pages may be others'."""
        there = [one for one in walks if one.slot in self._open and self.tokens.is_there(one.slot, n_opened)]
        if not there or self._brancher is None:
            return
        tokens = self.tokens.newest
        for one in there:
            tokens[one.slot, one.start + 1 : one.start + 1 + len(one.tokens)] = one.tokens
        self._brancher.straighten(there)

    def settle(self, plan: StepPlan, *, may_branch: bool = False) -> Settled:
        """The step with true starts and its guesses, of which some may be trees, if they may."""
        spans, self._newest = plan.spans, None
        if plan.knows_starts:
            self._lengths.clear()
        slots, n_drafts = spans.slots, spans.n_drafts
        starts = [self._lengths.get(slot, latest) for slot, latest in zip(slots, spans.starts, strict=True)]
        brancher, tokens, contexts = self._brancher if may_branch else None, self.tokens.newest, {}
        for i in (i for i, n in enumerate(n_drafts) if n):
            may = brancher is not None and brancher.may_branch(slots[i])
            contexts[i] = DraftContext(slots[i], tokens[slots[i], : starts[i] + 1], n_drafts[i], may)
        if self._queuing is not None and contexts and not plan.masked and not plan.foretold:
            queued = self._queuing.queue(list(contexts.values()))
            if queued is not None:
                return self._queued(plan, starts, queued)
        sure = {i: _sure(contexts[i], at, ids) for i, at, ids in plan.foretold}
        asking = {i: context for i, context in contexts.items() if not sure.get(i)}
        found = dict(zip(asking, self._drafter.guess(list(asking.values())), strict=True)) if asking else {}
        chosen = {i: found[i] if i in found else sure[i] for i in contexts}
        guesses = {i: guess.tokens if isinstance(guess, DraftTree) else guess for i, guess in chosen.items()}
        lengths, made, drafts = list(spans.lengths), [0] * len(slots), list[int]()
        for i, wants in enumerate(spans.wants):
            guess = guesses.get(i, [])
            if n_drafts[i]:
                tokens[slots[i], starts[i] + 1 : starts[i] + 1 + len(guess)] = guess
                lengths[i] += len(guess) - n_drafts[i]
                made[i] = len(guess)
            drafts += [*guess, NO_DRAFT] if wants else []
        true = Spans(slots, starts, lengths, made, spans.wants)
        return Settled(
            msgspec.structs.replace(plan, spans=true, n_tokens=sum(lengths)),
            self.tokens.n_opened,
            [len(guess) for guess in guesses.values()],
            drafts,
            None if self.tokens.is_live or not any(made) else _guesses(true, guesses),
            {i: guess for i, guess in found.items() if isinstance(guess, DraftTree)},
        )

    def may_follow(self, plan: StepPlan) -> bool:
        """Whether a step can begin where only the device knows: each of its sequences verifies drafts, as in the newest
        step, and nothing about them is asked before."""
        newest, spans = self._newest, plan.spans
        if newest is None or plan.knows_starts or plan.opened or plan.copies or plan.masked or plan.foretold:
            return False
        return all(spans.n_drafts) and all(spans.wants) and newest.drafted.keys() >= set(spans.slots)

    def most_behind(self, plan: StepPlan) -> np.ndarray:
        """int64 [n_spans]: how far before their planned starts spans of a step that may follow can begin."""
        spans, newest = plan.spans, self._newest
        assert newest is not None
        known = newest.ends or newest.earliest
        return np.array([latest - known[slot] for slot, latest in zip(spans.slots, spans.starts, strict=True)])

    def follow(self, plan: StepPlan) -> Settled | None:
        """A step that may follow, and its guesses, launched behind the newest step, which may be computing; None where
        the drafter cannot, and nothing is done."""
        spans, newest = plan.spans, self._newest
        assert newest is not None and self._queuing is not None
        drafted, columns = newest.drafted, zip(spans.slots, spans.starts, spans.n_drafts, strict=True)
        queued = self._queuing.follow([LateContext(slot, at, 1 + drafted[slot], n) for slot, at, n in columns])
        if queued is None:
            return None
        behind = self.most_behind(plan)
        found = self._queued(plan, spans.starts, queued)
        assert found.guesses is not None
        found.guesses = dataclasses.replace(found.guesses, most_behind=behind)
        found.earliest = dict(zip(spans.slots, (np.array(spans.starts) - behind).tolist(), strict=True))
        found.before = newest
        return found

    def _queued(self, plan: StepPlan, starts: list[int], queued: Queued) -> Settled:
        """The step of a plan whose guesses the device is making, all of them."""
        spans, forced = plan.spans, None
        true = Spans(spans.slots, starts, spans.lengths, spans.n_drafts, spans.wants)
        drafted = [i for i, n in enumerate(spans.n_drafts) if n]
        if self._chance is not None:
            chance, source = self._chance, self._source
            forced = [
                sum(1 for _ in itertools.takewhile(lambda _: source.random() < chance, range(n)))
                for n in queued.lengths
            ]
        places = {
            i: list(range(at, at + n * queued.stride, queued.stride))
            for i, at, n in zip(drafted, queued.at, queued.lengths, strict=True)
        }
        self._newest = Settled(
            msgspec.structs.replace(plan, spans=true),
            self.tokens.n_opened,
            queued.lengths,
            [],
            dataclasses.replace(_guesses(true, places), found=queued.found),
            queued=queued,
            forced=forced,
            earliest=dict(zip(spans.slots, starts, strict=True)),
        )
        return self._newest

    def drafts_of(self, settled: Settled) -> list[SpanDrafts]:
        """Of each masked span."""
        spans, trees = settled.plan.spans, settled.trees
        n_rows = [1 + n if wants else 0 for n, wants in zip(spans.n_drafts, spans.wants, strict=True)]
        first = [0, *itertools.accumulate(n_rows)]
        return [
            SpanDrafts(settled.drafts[first[i] : first[i + 1] - 1], trees[i].parents if i in trees else [])
            for i in settled.plan.masked
        ]

    def queue_keep(self, settled: Settled, sampled: Sampled) -> None:
        """Have the device find what counts of a step whose guesses it has, from its choice."""
        queued, spans = settled.queued, settled.plan.spans
        if queued is None:
            return
        n_rows = [1 + n if wants else 0 for n, wants in zip(spans.n_drafts, spans.wants, strict=True)]
        first = [0, *itertools.accumulate(n_rows)]
        drafted = [i for i, n in enumerate(spans.n_drafts) if n]
        lines = [
            [spans.slots[i] for i in drafted], [first[i] for i in drafted], queued.lengths, queued.at,
            settled.forced or [-1] * len(drafted),
        ]  # fmt: skip
        standing.keep(
            self._tables, self._tables.upload(np.array(lines, np.int64)), max(queued.lengths), queued.stride,
            queued.found, sampled.token_ids, sampled.status,
        )  # fmt: skip

    def keep(self, settled: Settled, token_ids: list[int], statuses: list[int]) -> Kept:
        """What counts: of each span the tokens up to the first that is not the draft at its place, and none from a row
        that failed on. Steps before it are kept. token_ids, statuses: of its sampled rows."""
        spans, starts, rights = settled.plan.spans, settled.starts, self._rights(settled, token_ids)
        kept, at = Kept([], [], settled.n_drafted, []), 0
        columns = zip(spans.slots, spans.lengths, spans.wants, spans.n_drafts, strict=True)
        for i, (slot, length, wants, n_drafts) in enumerate(columns):
            start = starts[i]
            end = start + length
            if i in settled.trees:
                rows = slice(at, at + 1 + n_drafts)
                way = self._walk(settled.trees[i], token_ids[rows], statuses[rows])
                n_new = self._keep_tree(kept, Walk(at, slot, start, *way))
                at += 1 + n_drafts
                end += n_new - 1 - n_drafts
            elif wants:
                row = at
                while rights(row) and not statuses[row]:
                    row += 1
                n_new = row - at + (not statuses[row])
                kept.n_new.append(n_new)
                kept.rows.extend(range(at, at + max(1, n_new)))
                at += 1 + n_drafts
                end += n_new - 1 - n_drafts
            settled.ends[slot] = end
            if self.tokens.is_there(slot, settled.n_opened):
                self._lengths[slot] = end
        return kept

    def _rights(self, settled: Settled, token_ids: list[int]) -> Callable[[int], bool]:
        """Whether the draft of a sampled row counts."""
        if settled.queued is None:
            drafts = settled.drafts
            return lambda row: drafts[row] != NO_DRAFT and self._counts(drafts[row], token_ids[row])
        read, right = settled.queued.read(), list[bool]()
        forced_of: Sequence[int | None] = settled.forced or [None] * len(read)
        guesses = iter(zip(read, forced_of, strict=True))
        for n, wants in zip(settled.plan.spans.n_drafts, settled.plan.spans.wants, strict=True):
            if n:
                guess, forced = next(guesses)
                chosen = token_ids[len(right) : len(right) + n]
                same = [draft == token for draft, token in zip(guess, chosen, strict=True)]
                right += same if forced is None else [place < forced for place in range(n)]
            right += [False] if wants else []
        return right.__getitem__

    def _walk(self, tree: DraftTree, token_ids: list[int], statuses: list[int]) -> tuple[list[int], list[int]]:
        """Nodes that are kept, and the tokens chosen behind the root and them, but for one that failed at the end."""
        nodes = walk(tree, token_ids, statuses, self._counts)
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
