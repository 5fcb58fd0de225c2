"""A step in which compute failed for some slots: who ends, what leaves the tree, who must compute again.

The rule. The faulted sequence ends with an error. What it wrote that may be bad is void: those pages leave the tree
with all that is below them. Every live sequence that holds one, copied rows of one, or has its path through one, is
sent back to compute again, and its results in flight are void.
What may be bad: after non-finite logits, everything that the sequence read, the cached prefix on which it began
included, since K/V is looked at only where a token is sampled, maybe many chunks later. After another fault, what its
span of that step and its later spans wrote.
Delivered tokens are right: whoever samples from non-finite K/V has non-finite logits, and other faults concern pages
that became visible in that step or later, whose readers are still in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.control.live_seqs import LiveSeqs
from quire.control.node import Node
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq, SeqState
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code, Failure
from quire.core.result import StepResult

FOUND_LATE = frozenset({Code.NON_FINITE_LOGITS})
"""Faults whose cause may lie many chunks before the step that shows them."""
NO_TOKEN = "No token is left to choose: grammar, allowed_token_ids, bad_words and min_tokens exclude every one."
BROKEN = "the model could not produce a token for this sequence"


def end_faulted(live: LiveSeqs, in_flight: Iterable[PlanBuilder], result: StepResult, deltas: list[SeqDelta]) -> None:
    """Apply the rule to each fault of a verified result, whose step is the oldest in flight; appends error deltas."""
    builders = list(in_flight)
    spans = builders[0].plan.spans
    for fault in result.faults:
        row = spans.slots.index(fault.slot)
        seq = builders[0].seqs[row]
        start = min(spans.starts[row], len(seq.tokens) - 1)  # drafts that were rejected let it begin before
        if result.step > seq.ignore_through:
            failure = Failure(fault.code, NO_TOKEN if fault.code is Code.EMPTY_MASK else BROKEN)
            deltas.append(SeqDelta(seq.request.request_id, seq.index, [], FinishReason.ERROR, failure=failure))
            live.end(seq, FinishReason.ERROR, trusted=False)
        is_late = fault.code in FOUND_LATE
        _distrust(live, builders, seq, 0 if is_late else start // live.config.page_size)


def _distrust(live: LiveSeqs, builders: list[PlanBuilder], origin: Seq, first_bad: int) -> None:
    """Detach what `origin` wrote from page index `first_bad` on, and send its readers back."""
    cache, bad_pages, bad_nodes = live.caches[origin.dp_rank], set[int](), set[Node]()
    tree = cache.tree
    if first_bad == 0:
        bad_pages.update(origin.copied_pages)
    suspects = {seq for builder in builders for seq in builder.seqs}.union(live.running) - {origin}
    suspects = {seq for seq in suspects if seq.dp_rank == origin.dp_rank}
    tainted, fresh = {origin: first_bad}, [(origin, first_bad)]
    while fresh:
        seq, index = fresh.pop()
        bad_pages.update(page for table in _tables(seq) for page in table[index:])
        bad_pages.update(_window_pages(live, seq, index))
        top = _published(live, seq, index, bad_nodes)
        if top is not None:
            bad_nodes.update(tree.subtree(top))
            bad_pages.update(page for node in bad_nodes for table in node.tables for page in table)
        bad_pages.discard(0)  # no page
        found = [(other, _first_tainted(other, bad_pages, bad_nodes, live.config.page_size)) for other in suspects]
        fresh += [(other, index) for other, index in found if index is not None]
        tainted |= {other: index for other, index in found if index is not None}
        suspects.difference_update(tainted)
    for seq, index in tainted.items():
        good = [table[:index] for table in _tables(seq)]
        if seq.state is SeqState.RUNNING:
            live.preempt(seq, trusted=False)
        elif seq.state is SeqState.WAITING:
            seq.ignore_through = seq.last_step
        # Its spans in flight are void, and others may get these pages; a later one may show that the rest is bad, too.
        seq.left_tables, seq.copied_pages = good, []
    if cache.snapshots is not None:
        for seq in tainted:
            cache.snapshots.drop_all(seq)
            cache.snapshots.distrust(tree.path(cache.salt(seq), seq.tokens, len(seq.tokens)))
    for node in bad_nodes:
        if node.parent is not None and node.parent not in bad_nodes:
            tree.detach(node)
    tree.discard(bad_pages)


def _tables(seq: Seq) -> list[list[int]]:
    return seq.tables if seq.state is SeqState.RUNNING else seq.left_tables


def _first_tainted(seq: Seq, bad_pages: set[int], bad_nodes: set[Node], page_size: int) -> int | None:
    """Index of the first page of `seq` that cannot be trusted, or None."""
    tables = _tables(seq)
    found = [index for table in tables for index in [_first_of(table, bad_pages)] if index is not None]
    if found:
        return min(found)
    if not bad_pages.isdisjoint(seq.copied_pages):
        return (seq.prompt_len - 1) // page_size
    return len(tables[0]) if seq.node in bad_nodes else None


def _first_of(table: list[int], pages: set[int]) -> int | None:
    for index, page in enumerate(table):
        if page in pages:
            return index
    return None


def _window_pages(live: LiveSeqs, seq: Seq, first_bad: int) -> list[int]:
    """Pages of windows in the tree from index `first_bad` of the path of `seq` on.

    It may have brought back what others' nodes had lost there, and given it back since.
    """
    cache = live.caches[seq.dp_rank]
    if cache.n_full == cache.n_groups:
        return []
    found = cache.tree.path(cache.salt(seq), seq.tokens, len(seq.tokens))
    return [page for table in found.tables[cache.n_full :] for page in table[first_bad:]]


def _published(live: LiveSeqs, seq: Seq, first_bad: int, known: set[Node]) -> Node | None:
    """The topmost part of the tree that holds pages of `seq` from index `first_bad` on, cut to begin there.

    None if there is none, or if it is inside the `known` nodes. Where `seq` has given its page back, what the tree has
    for its tokens counts as its own.
    """
    cache, tables = live.caches[seq.dp_rank], _tables(seq)
    tree, salt = cache.tree, cache.salt(seq)
    if not tables:
        return None
    found = tree.path(salt, seq.tokens, len(tables[0]) * live.config.page_size)
    for index in range(first_bad, found.n_pages):
        if tables[0][index] in (0, found.tables[0][index]):
            return None if found.node_at(index) in known else tree.cut(salt, seq.tokens, index)
    return None
