"""Who gives way when pages run out: the running sequence with the largest key (lowest priority, then latest arrival),
of those on the data-parallel rank that lacks them.

Preemption is by recompute: full pages stay in the tree, and results in flight still count, so that no token is lost.
Invariant: a sequence that has a span in the plan being written is never preempted by it.
"""

from __future__ import annotations

from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq


def make_room(live: LiveSeqs, builder: PlanBuilder, seq: Seq) -> bool:
    """One more page in each table of `seq`, which decodes; False if it had to give way itself, or must wait.

    Decoding sequences are planned in key order, so every victim comes after `seq` and has no span yet. The last one
    waits if its own steps in flight are about to leave pages behind a window, and a beam if others of its search have
    spans.
    """
    cache = live.caches[seq.dp_rank]
    while not cache.has(cache.n_groups):
        builder.tight.add(seq.dp_rank)
        victim = live.last_running(seq.dp_rank)
        if (victim is seq and seq.planned >= seq.returns_at) or _is_planned(victim, builder):
            return False
        live.preempt(victim)
        if victim is seq or (victim.search is not None and victim.search is seq.search):
            return False
    builder.grow(cache, seq, 1)
    return True


def fit_chunk(live: LiveSeqs, builder: PlanBuilder, seq: Seq, length: int) -> int:
    """Tokens of a prompt chunk that fit into pages now.

    Later sequences without a span in this plan are preempted, but only to get a first page.
    Returns 0 when `seq` must wait: the sequences that have the pages are planned in this step and so make progress.
    """
    cache = live.caches[seq.dp_rank]
    lacking = live.config.pages_for(seq.planned + length) - seq.n_table_pages
    while lacking > 0 and cache.n_available < cache.n_groups:
        victim = live.last_running(seq.dp_rank)
        if victim is seq or _is_planned(victim, builder):
            break
        live.preempt(victim)
        builder.tight.add(seq.dp_rank)
    if lacking * cache.n_groups > cache.n_available:
        builder.tight.add(seq.dp_rank)
        length = min(length, cache.n_fitting(seq, cache.n_available))
    return length


def _is_planned(victim: Seq, builder: PlanBuilder) -> bool:
    """Whether it, or a beam that would go with it, is in the plan that is being written."""
    if victim.search is None:
        return victim.last_step == builder.step
    return any(member.last_step == builder.step for member in victim.search.members)
