"""Decoding with drafts: spans that verify tokens which the device has guessed, and keep those that are right.

Owns the room for drafts. Does not own how many a sequence should have (`draft_policy.py`), the guesses (compute) nor
what becomes of a result (`commit.py`).
How many were kept is known to the device first. The next plan is made before the host knows: it counts every draft in
flight as kept, takes pages for that, and says where spans begin at the latest (decision 0012).
Invariants: drafts take only tokens and pages that nobody else wants in this step; there is one data-parallel rank.
"""

from __future__ import annotations

from quire.control.forking import place_beams
from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.preemption import make_room
from quire.control.seq import Seq


def choose_drafts(live: LiveSeqs, builder: PlanBuilder) -> dict[Seq, int]:
    """How many drafts which sequences should have in this step; empty: none has any."""
    step, drafts = builder.step, live.drafts
    if not drafts.most:
        return {}
    if drafts.copies is not None and step >= drafts.copies.from_step:
        drafts.watch(live.running, step)
    if step < drafts.none_before:
        return {}
    asked = [seq for seq in live.running if seq.drafts_from <= step or seq.foretold is not None]
    if not asked:  # what a grammar foretells may come at any time
        drafts.none_before = min([0 if seq.is_masked else seq.drafts_from for seq in live.running], default=0)
        return {}
    seqs = [seq for seq in asked if seq.can_draft and seq.prefill_end <= seq.planned < seq.limit]
    n_seqs = len(live.running) + sum([search.n_lacking for search in live.searches.values() if search.is_ready])
    n_free = min(builder.budgets[0], live.config.most_sampled, live.drafts.most_rows) - n_seqs
    if not seqs or n_free <= 0:
        return {}
    if live.drafts.costs is not None and _prompts_wait(live):
        return {}
    sure = _sure(live, seqs, n_free, step)
    seqs, n_free = [seq for seq in seqs if seq.drafts_from <= step and seq not in sure], n_free - sum(sure.values())
    if not seqs or n_free <= 0:
        return sure
    lengths = live.drafts.choose(seqs, len(live.running), n_free, step)
    return sure | {seq: length for seq, length in zip(seqs, lengths, strict=True) if length}


def _sure(live: LiveSeqs, seqs: list[Seq], n_free: int, step: int) -> dict[Seq, int]:
    """Drafts of those of which is known what they must say, if that pays."""
    found: dict[Seq, int] = {}
    for seq in seqs:
        if seq.foretold is not None and n_free > 0:
            found[seq] = min(len(seq.foretold[1]) - 1, live.drafts.most, n_free)
            n_free -= found[seq]
    return found if live.drafts.takes(sum(found.values()), len(live.running), step) else {}


def _prompts_wait(live: LiveSeqs) -> bool:
    """Whether tokens of running prompts want this step, too. Then a draft's row takes as long as one of theirs, which
    is never in vain; and nothing would hide the launch of a step so long."""
    return any(seq.planned < seq.prefill_end for seq in live.running)


def plan_with_drafts(live: LiveSeqs, builder: PlanBuilder, wanted: dict[Seq, int]) -> list[Seq]:
    """A token and its drafts for each running sequence whose known tokens are all planned; returns the others."""
    prompts: list[Seq] = []
    spans, step, searches = builder.plan.spans, builder.step, live.searches
    for seq in live.running:  # in key order; preemption shortens the list at its end only
        if searches and seq.search is not None and seq.search.is_ready and not place_beams(live, builder, seq.search):
            continue
        start = seq.planned
        if start < seq.prefill_end:
            prompts.append(seq)
        elif start < seq.limit and (start < seq.room or make_room(live, builder, seq)):
            n_drafts = _fitting(live, builder, seq, wanted.get(seq, 0))
            seq.plan(1 + n_drafts, step)
            if n_drafts and seq.foretold is not None:
                builder.plan.foretold.append((len(builder.seqs), *seq.foretold))
            if seq.is_masked:
                builder.plan.masked.append(len(builder.seqs))
            spans.add(seq.slot, start, 1 + n_drafts, True, n_drafts)
            builder.seqs.append(seq)
    builder.budgets[0] -= sum(spans.lengths)
    return prompts


def _fitting(live: LiveSeqs, builder: PlanBuilder, seq: Seq, most: int) -> int:
    """Drafts that the sequence's end and free pages leave room for, at most `most`."""
    n_drafts = min(most, seq.limit - seq.planned - 1)
    lacking = live.config.pages_for(seq.planned + 1 + n_drafts) - seq.n_table_pages
    n_free = live.cache.pool.n_free // live.cache.n_groups
    if 0 < lacking <= n_free - len(live.running):  # each of them may need one in this step
        builder.grow(live.cache, seq, lacking)
    return min(n_drafts, seq.room - seq.planned - 1)
