"""How many tokens of prompts a step takes beside sequences that decode: what these can bear (`planner/pace`).

Owns who counts as waiting behind the first prompt: those who could begin now. Does not own who enters (`admission`).
"""

from __future__ import annotations

from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq, SeqState


def keep_pace(live: LiveSeqs, builder: PlanBuilder, prompts: list[Seq], n_seqs: int) -> None:
    """Leave the prompts of this step no more tokens than the decodes in it can bear, priced at the longest context. A
    step takes as long as the data-parallel rank that has the most of it. n_seqs: see `Admission`."""
    pace, starts, budgets = live.config.pace, builder.plan.spans.starts, builder.budgets
    if pace is None:
        return
    n_decoding = max(1, len(live.running) - len(prompts))  # of a pipeline's stages, this step has some of them
    n_behind = max(0, len(prompts) + _n_ready(live, prompts, n_seqs) - 1)
    for dp_rank, budget in enumerate(budgets):
        own = starts
        if len(budgets) > 1:
            own = [start for seq, start in zip(builder.seqs, starts, strict=True) if seq.dp_rank == dp_rank]
        context = max((seq.planned for seq in prompts if seq.dp_rank == dp_rank), default=0)
        budgets[dp_rank] = min(budget, pace.prompt_tokens(len(own), sum(own), context, n_behind / n_decoding))


def _n_ready(live: LiveSeqs, prompts: list[Seq], n_seqs: int) -> int:
    """Waiting requests that could begin, by slots and by pages beyond what running prompts will take, if all need what
    the first in the queue does."""
    first = live.waiting.peek()
    if first is None or not live.adapters.has_room(first):
        return 0
    n_slots = _n_slots(live, n_seqs)
    if n_slots <= 0:
        return 0
    needed = live.cache.needed
    claimed = sum(needed(seq.prefill_end, seq.tables, seq.held_from) for seq in prompts)
    n_pages = sum(live.config.pages_of(min(len(first.tokens) + 1, first.limit)))
    n_fit = max(0, sum(cache.n_available for cache in live.caches) - claimed) // n_pages
    return min(n_slots, n_fit, _n_unstarted(live))


def _n_slots(live: LiveSeqs, n_seqs: int) -> int:
    """Free ones that neither memory forbids nor running searches take for their beams."""
    n_unused = live.config.max_num_seqs - n_seqs
    searches = [search for search in live.searches.values() if search.root.state is SeqState.RUNNING]
    n_free = sum(max(0, len(free) - n_unused) for free in live.free_slots)
    return n_free - sum(search.n_lacking for search in searches)


def _n_unstarted(live: LiveSeqs) -> int:
    """Waiting sequences whose whole prompt is to be computed: samples of a request that has begun fork, and compute a
    token each, where nothing recurs."""
    if live.config.has_states:
        return len(live.waiting)
    begun = {seq.request.request_id for seq in live.running}
    return min(len(live.waiting), len(live.requests) - len(begun))
