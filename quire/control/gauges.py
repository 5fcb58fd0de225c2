"""What an operator sees of control: counters kept on the way, gauges read from the state when asked."""

from __future__ import annotations

import dataclasses
import itertools

from quire.control.live_seqs import LiveSeqs
from quire.control.node import Node
from quire.control.seq import Seq
from quire.control.tree import PrefixTree
from quire.core.events import EngineStats, SeqDelta

MAX_MAP_CELLS = 4096
MAX_TREE_NODES = 240
MAX_WALKED_NODES = 2048
"""Weighing that many takes one to three milliseconds, once a second."""


@dataclasses.dataclass(slots=True)
class Counters:
    """They only grow; `progress_s` is the clock when the last step ended or work came to an idle engine."""

    progress_s: float
    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def count_admissions(self, admitted: list[Seq]) -> None:
        """Sequences that just got a slot; only the first admission of each counts."""
        for seq in admitted:
            if seq.n_admissions == 1:
                self.prompt_tokens += seq.prompt_len if seq.index == 0 else 0
                self.prefix_queries += seq.prompt_len
                self.prefix_hits += seq.first_cached

    def count_step(self, n_tokens: int, deltas: list[SeqDelta], now_s: float) -> None:
        """A step was committed."""
        self.steps += 1
        self.computed_tokens += n_tokens
        self.count_tokens(deltas)
        self.progress_s = now_s

    def count_tokens(self, deltas: list[SeqDelta]) -> None:
        """Output tokens are on their way to their requests."""
        for delta in deltas:
            self.generation_tokens += len(delta.token_ids)


def read_stats(live: LiveSeqs, counters: Counters, n_in_flight: int, age_s: float) -> EngineStats:
    """All of `EngineStats` but the page map, in time proportional to the running sequences."""
    n_groups, page_size, caches = live.cache.n_groups, live.config.page_size, live.caches
    n_pages, n_free = live.config.n_usable_pages * len(caches), sum([cache.n_available for cache in caches])
    n_held = n_pages - n_free
    n_tokens = n_repeats = 0
    for seq in live.running:
        n_behind = sum(seq.held_from)
        n_tokens += seq.planned * n_groups - n_behind * page_size
        n_repeats += seq.n_table_pages * n_groups - n_behind
    n_repeats -= n_held  # shared pages are full ones
    dp_ranks = range(len(caches)) if len(caches) > 1 else ()
    return EngineStats(
        n_running=len(live.running),
        dp_running=[live.n_running(dp_rank) for dp_rank in dp_ranks],
        dp_pages_free=[caches[dp_rank].n_available for dp_rank in dp_ranks],
        n_waiting=len(live.waiting),
        n_pages=n_pages,
        n_pages_free=n_free,
        n_pages_cached=sum([cache.tree.n_evictable for cache in caches]),
        n_tree_nodes=sum([cache.tree.n_nodes for cache in caches]),
        n_tokens_held=n_tokens - n_repeats * page_size,
        n_slots_taken=n_held * page_size,
        n_drafts=live.drafts.n_spans,
        draft_tokens=live.drafts.n_verified,
        draft_saved_s=live.drafts.saved_s,
        accepted_at=list(live.drafts.n_right),
        n_pages_saved=n_repeats,
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        computed_tokens=counters.computed_tokens,
        generation_tokens=counters.generation_tokens,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        preemptions=live.preemptions,
        finished=dict(live.finished),
        last_step_age_s=age_s,
        steps_in_flight=n_in_flight,
    )


def tree_shape(*trees: PrefixTree) -> list[tuple[int, int, int]]:
    """The heaviest nodes of the prefix trees, parents first: (index of the parent or -1, pages, locks).

    A node weighs its pages and those below it, so a node that is told has its parents told. Of a very large tree only
    the `MAX_WALKED_NODES` nearest to the root are weighed, which bounds the time.
    """
    roots = (root for tree in trees for root in tree.roots.values())
    walked: list[Node] = []
    parents: list[int] = []
    queue = [(-1, root) for root in itertools.islice(roots, MAX_WALKED_NODES)]
    for parent, node in queue:  # which grows behind the walk
        if node.n_pages:
            walked.append(node)
            parents.append(parent)
            parent = len(walked) - 1
        queue += [(parent, child) for child in itertools.islice(node.children.values(), MAX_WALKED_NODES - len(queue))]
    weights = [node.n_pages for node in walked]
    for i in range(len(walked) - 1, -1, -1):
        if parents[i] >= 0:
            weights[parents[i]] += weights[i]
    by_weight = sorted(range(len(walked)), key=weights.__getitem__, reverse=True)  # of equal ones the parent first
    kept = sorted(by_weight[:MAX_TREE_NODES])
    place = {i: n for n, i in enumerate(kept)} | {-1: -1}
    return [(place[parents[i]], walked[i].n_pages, walked[i].lock) for i in kept]


def page_map(live: LiveSeqs) -> bytes:
    """One byte a cell, the pools behind one another: 0 free, 1 cached, else a slot that holds it, modulo 254, plus 2.
    Walks every page held.

    Above `MAX_MAP_CELLS` pages, cell i stands for the pages from i * stride on: it shows an owner if one of them has
    one, and is a sample (the first page) where none has, since the tree is not walked for a picture.
    """
    refs = list(itertools.chain.from_iterable([cache.pool.refs for cache in live.caches]))
    stride = -(-len(refs) // MAX_MAP_CELLS)
    cells = bytearray([min(count, 1) for count in refs[::stride]])
    for seq in live.running:
        owner, first_page = seq.slot % 254 + 2, seq.dp_rank * live.config.n_pages
        for table, first in zip(seq.tables, seq.held_from, strict=True):
            for page in table[first:]:
                cells[(first_page + page) // stride] = owner
    return bytes(cells)
