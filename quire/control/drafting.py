"""Decoding with drafts: spans that verify tokens which the device has guessed, and keep those that are right.

Owns how many drafts a span has. Does not own the guesses (compute) nor what becomes of a result (`commit.py`).
How many were kept is known to the device first. The next plan is made before the host knows: it counts every draft in
flight as kept, takes pages for that, and says where spans begin at the latest (decision 0012).
Invariant: drafts take only tokens and pages that nobody else wants in this step.
"""

from __future__ import annotations

from quire.control.draft import StepDraft
from quire.control.preemption import make_room
from quire.control.roster import Roster
from quire.control.seq import Seq


def plan_with_drafts(roster: Roster, draft: StepDraft) -> list[Seq]:
    """A token and its drafts for each running sequence whose known tokens are all planned; returns the others."""
    prompts: list[Seq] = []
    spans, step = draft.plan.spans, draft.step
    most = min(roster.config.num_speculative_tokens, max(0, draft.budget // max(1, len(roster.running)) - 1))
    for seq in roster.running:  # in key order; preemption shortens the list at its end only
        start = seq.planned
        if start < seq.prefill_end:
            prompts.append(seq)
        elif start < seq.limit and (start < seq.room or make_room(roster, draft, seq)):
            n_drafts = _fitting(roster, draft, seq, most)
            seq.plan(1 + n_drafts, step)
            if seq.is_masked:
                draft.plan.masked.append(len(draft.seqs))
            spans.add(seq.slot, start, 1 + n_drafts, True, n_drafts)
            draft.seqs.append(seq)
    draft.budget -= sum(spans.lengths)
    return prompts


def _fitting(roster: Roster, draft: StepDraft, seq: Seq, most: int) -> int:
    """Drafts that the sequence's end and free pages leave room for, at most `most`."""
    n_drafts = min(most, seq.limit - seq.planned - 1) if seq.can_draft else 0
    lacking = roster.config.pages_for(seq.planned + 1 + n_drafts) - len(seq.pages)
    if 0 < lacking <= roster.cache.pool.n_free - len(roster.running):  # each of them may need one in this step
        draft.grow(roster.cache, seq, lacking)
    return min(n_drafts, seq.room - seq.planned - 1)
