"""Bugs to be caught: each is a small change of control, applied through pytest's monkeypatch. A test of the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from quire.control import commit, faults, live_seqs, scheduler
from quire.control.admission import Admission
from quire.control.cache import PageCache
from quire.control.config import SchedulerConfig
from quire.control.eviction import EvictionOrder
from quire.control.live_seqs import LiveSeqs
from quire.control.pages import PagePool
from quire.control.plan_builder import PlanBuilder
from quire.control.queue import WaitQueue
from quire.control.seq import Seq, SeqState
from quire.control.slot_params import slot_params
from quire.control.tree import PrefixTree
from quire.core.events import FinishReason

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]


def wrap(patch: Patch, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`."""
    patch.setattr(owner, name, make(getattr(owner, name)))


def salt_is_ignored(patch: Patch) -> None:
    wrap(patch, PrefixTree, "path", lambda real: lambda self, salt, tokens, n: real(self, "", tokens, n))
    wrap(patch, PrefixTree, "extend", lambda real: lambda self, salt, *rest, **named: real(self, "", *rest, **named))


def fork_forgets_the_copy(patch: Patch) -> None:
    patch.setattr(PlanBuilder, "copy", lambda self, seq, source, target, n: None)


def fork_copies_a_row_less(patch: Patch) -> None:
    wrap(
        patch,
        PlanBuilder,
        "copy",
        lambda real: lambda self, seq, source, target, n: n > 1 and real(self, seq, source, target, n - 1),
    )


def fork_writes_the_shared_page(patch: Patch) -> None:
    def fork(self: Admission, seq: Seq, sibling: Seq) -> bool:
        self.live.waiting.pop()
        cache, n_pages = self.live.cache, self.live.config.pages_for(seq.prompt_len)
        starts = cache.starts(seq.prompt_len - 1)
        tables = [[0] * first + table[first:n_pages] for table, first in zip(sibling.tables, starts, strict=True)]
        cache._begin(seq, tables, starts)
        self.live.admit(seq, seq.prompt_len - 1, [])
        self.builder.open(seq)
        self.builder.span(seq, 1)
        self.admitted.append(seq)
        return True

    patch.setattr(Admission, "_fork", fork)


def fork_before_the_prompt_is_written(patch: Patch) -> None:
    def sibling(self: Admission, seq: Seq) -> Seq | None:
        found = real(self, seq)
        if found is None or found.planned < found.prompt_len:
            return found
        ready = copy.copy(found)
        ready.prompt_step = -1
        return ready

    real = Admission._sibling
    patch.setattr(Admission, "_sibling", sibling)


def whole_prompt_is_matched(patch: Patch) -> None:
    def match(self: PageCache, seq: Seq, step: int) -> Any:
        return self.tree.match(seq.request.cache_salt, seq.tokens, len(seq.tokens))

    patch.setattr(PageCache, "match", match)


def match_compares_the_first_page_of_a_node_only(patch: Patch) -> None:
    patch.setattr(PrefixTree, "_common_pages", lambda self, node, tokens, depth, last: min(node.n_pages, last - depth))


def page_is_freed_twice(patch: Patch) -> None:
    def drop(self: PagePool, pages: Any) -> None:
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] <= 0:
                self._free.append(page)

    patch.setattr(PagePool, "drop", drop)
    wrap(
        patch,
        PageCache,
        "release",
        lambda real: lambda self, seq, keep: (real(self, seq, keep=keep), self.pool.drop(seq.tables[0][-1:])),
    )


def unlock_is_forgotten(patch: Patch) -> None:
    patch.setattr(PrefixTree, "unlock", lambda self, node: None)


def cancelled_in_flight_keeps_its_pages(patch: Patch) -> None:
    def release(self: PageCache, seq: Seq, *, keep: bool) -> None:
        if not (seq.computed < seq.planned and seq.n_table_pages > 1):
            real(self, seq, keep=keep)

    real = PageCache.release
    patch.setattr(PageCache, "release", release)


def eviction_takes_locked_leaves(patch: Patch) -> None:
    patch.setattr(
        EvictionOrder, "_is_valid", staticmethod(lambda entry: entry[2].parent is not None and not entry[2].children)
    )


def eviction_leaks_a_page(patch: Patch) -> None:
    def trim(self: PrefixTree, leaf: Any, n_cut: int) -> int:
        n_free: int = real(self, leaf, n_cut)
        if n_cut > 1:
            self._pool.refs[self._pool._free.pop()] = 1
        return n_free

    real = PrefixTree._trim
    patch.setattr(PrefixTree, "_trim", trim)


def split_loses_the_lock(patch: Patch) -> None:
    def split(self: PrefixTree, node: Any, n_upper: int) -> Any:
        upper = real(self, node, n_upper)
        upper.lock = min(upper.lock, 1)
        return upper

    real = PrefixTree._split
    patch.setattr(PrefixTree, "_split", split)


def partial_pages_enter_the_tree(patch: Patch) -> None:
    def publish(self: PageCache, seq: Seq, *, leaving: bool = False) -> None:
        planned, seq.planned = seq.planned, -(-seq.planned // self.page_size) * self.page_size
        real(self, seq, leaving=leaving)
        seq.planned = planned

    real = PageCache.publish
    patch.setattr(PageCache, "publish", publish)


def unknown_tokens_enter_the_tree(patch: Patch) -> None:
    def publish(self: PageCache, seq: Seq, *, leaving: bool = False) -> None:
        known, seq.tokens = seq.tokens, seq.tokens + [0] * (seq.planned - len(seq.tokens))
        real(self, seq, leaving=leaving)
        seq.tokens = known

    real = PageCache.publish
    patch.setattr(PageCache, "publish", publish)


def foreign_pages_are_locked(patch: Patch) -> None:
    wrap(patch, PageCache, "publish", lambda real: lambda self, seq, leaving=False: real(self, seq, leaving=True))


def pages_of_a_fork_enter_the_tree(patch: Patch) -> None:
    def publish(self: PageCache, seq: Seq, *, leaving: bool = False) -> None:
        n_full, first = min(seq.planned, len(seq.tokens)) // self.page_size, seq.n_tree_pages
        if self.enabled and n_full > first:
            salt, tables = seq.request.cache_salt, seq.tables
            seq.node, seq.n_tree_pages = self.tree.extend(
                salt, seq.node, first, seq.tokens, tables, n_full, through=leaving
            )

    patch.setattr(PageCache, "publish", publish)


def fork_locks_the_whole_path_of_its_sibling(patch: Patch) -> None:
    def fork(self: PageCache, seq: Seq, source: Seq, n_tokens: int) -> None:
        n, starts = n_tokens // self.page_size, self.starts(n_tokens)
        self._begin(seq, [[0] * at + table[at:n] for table, at in zip(source.tables, starts, strict=True)], starts)
        if source.node is not None:
            self.tree.lock(self.tree.path(seq.request.cache_salt, source.tokens, source.n_tree_pages * self.page_size))
            seq.node, seq.n_tree_pages = source.node, source.n_tree_pages
        self.grow(seq, 1)

    patch.setattr(PageCache, "fork", fork)


def budget_is_overrun(patch: Patch) -> None:
    def build(self: PlanBuilder, step: int, budget: int, *others: Any) -> None:
        real(self, step, budget + 1, *others)

    real = PlanBuilder.__init__
    patch.setattr(PlanBuilder, "__init__", build)


def one_sequence_too_many(patch: Patch) -> None:
    def build(self: LiveSeqs, config: SchedulerConfig) -> None:
        real(self, config)
        self.free_slots[0].append(config.max_num_seqs)

    real = LiveSeqs.__init__
    patch.setattr(LiveSeqs, "__init__", build)


def length_is_one_too_long(patch: Patch) -> None:
    def build(self: Seq, *rest: Any) -> None:
        real(self, *rest)
        self.limit += 1

    real = Seq.__init__
    patch.setattr(Seq, "__init__", build)


def too_long_is_accepted(patch: Patch) -> None:
    patch.setattr(scheduler.Scheduler, "_verify", lambda self, request: None)


def preempted_goes_to_the_back(patch: Patch) -> None:
    def preempt(self: LiveSeqs, seq: Seq, *, trusted: bool = True) -> None:
        key = seq.key
        self._vacate(seq, SeqState.WAITING, trusted)
        self._arrivals += 1
        seq.key = (key[0], self._arrivals, key[2])
        self.waiting.push(seq)
        self.preemptions += 1

    patch.setattr(LiveSeqs, "preempt", preempt)


def first_is_preempted(patch: Patch) -> None:
    def make_room(live: LiveSeqs, builder: PlanBuilder, seq: Seq) -> bool:
        while live.cache.n_available < live.cache.n_groups:
            builder.tight.add(0)
            victims = [other for other in live.running if other.last_step != builder.step]
            live.preempt(victims[0])
            if victims[0] is seq:
                return False
        builder.grow(live.cache, seq, 1)
        return True

    patch.setattr(scheduler, "make_room", make_room)


def preempted_resumes_before_its_token_came(patch: Patch) -> None:
    wrap(
        patch,
        Admission,
        "__init__",
        lambda real: lambda self, r, d, committed, *rest: real(self, r, d, committed + 9, *rest),
    )


def preempted_loses_its_token_in_flight(patch: Patch) -> None:
    """Its result is dropped but it resumes with the token's K/V counted as known."""

    def preempt(self: LiveSeqs, seq: Seq, *, trusted: bool = True) -> None:
        real(self, seq, trusted=trusted)
        if seq.n_outputs > 0:
            seq.tokens.pop()

    real = LiveSeqs.preempt
    patch.setattr(LiveSeqs, "preempt", preempt)


def ended_still_speaks(patch: Patch) -> None:
    def end(self: LiveSeqs, seq: Seq, reason: FinishReason, *, trusted: bool = True) -> None:
        ignored = seq.ignore_through
        real(self, seq, reason, trusted=trusted)
        seq.ignore_through = ignored

    real = LiveSeqs.end
    patch.setattr(LiveSeqs, "end", end)
    patch.setattr(commit, "InvariantError", AssertionError)


def faulted_pages_stay_in_the_tree(patch: Patch) -> None:
    patch.setattr(faults, "_distrust", lambda live, builders, origin, first_bad: None)


def only_the_faulting_span_is_distrusted(patch: Patch) -> None:
    patch.setattr(faults, "FOUND_LATE", frozenset())


def readers_of_faulted_pages_go_on(patch: Patch) -> None:
    def distrust(live: LiveSeqs, builders: Any, origin: Seq, first_bad: int) -> None:
        node = faults._published(live, origin, first_bad, set())
        if node is not None and node.lock == 0:
            live.cache.tree.detach(node)

    patch.setattr(faults, "_distrust", distrust)


def admission_takes_before_it_checks(patch: Patch) -> None:
    def admit(self: Admission, seq: Seq) -> bool:
        if self.live.cache.n_available > 0 and seq.prompt_len > 4:
            page = self.live.cache.take(1)
            admitted = real(self, seq)
            if admitted:
                self.live.cache.pool.drop(page)
            return admitted
        return real(self, seq)

    real = Admission._admit
    patch.setattr(Admission, "_admit", admit)


def prompt_logprobs_skip_cached_rows(patch: Patch) -> None:
    def admit(self: Admission, seq: Seq) -> bool:
        rows, seq.prompt_rows = seq.prompt_rows, None
        admitted = real(self, seq)
        seq.prompt_rows = rows
        return admitted

    real = Admission._admit
    patch.setattr(Admission, "_admit", admit)


def slot_is_not_closed(patch: Patch) -> None:
    def vacate(self: LiveSeqs, *rest: Any) -> None:
        real(self, *rest)
        if len(self.running) > 1:
            self.closed.pop()

    real = LiveSeqs._vacate
    patch.setattr(LiveSeqs, "_vacate", vacate)


def samples_share_a_seed(patch: Patch) -> None:
    patch.setattr(live_seqs, "slot_params", lambda request, index: slot_params(request, 0))


def end_tokens_are_masked_too_short(patch: Patch) -> None:
    def params(request: Any, index: int) -> Any:
        good = slot_params(request, index)
        return msgspec.structs.replace(good, masked_until=good.masked_until - 1)

    patch.setattr(live_seqs, "slot_params", params)


def priority_is_ignored(patch: Patch) -> None:
    def add(self: LiveSeqs, request: Any) -> None:
        priority, request.priority = request.priority, 0
        real(self, request)
        request.priority = priority

    real = LiveSeqs.add
    patch.setattr(LiveSeqs, "add", add)


def prompts_starve_decodes(patch: Patch) -> None:
    def plan_decodes(live: LiveSeqs, builder: PlanBuilder) -> list[Seq]:
        running = live.running
        hidden = running[-1:] if len(running) > 2 and running[0].planned < running[0].prefill_end else []
        live.running = [seq for seq in running if seq not in hidden]
        prompts = real(live, builder)
        live.running = running
        return prompts

    real = scheduler._plan_decodes
    patch.setattr(scheduler, "_plan_decodes", plan_decodes)


def later_arrivals_overtake(patch: Patch) -> None:
    def pop_shortest(self: WaitQueue) -> Seq | None:
        first = real(self)
        heaps = [heap for level in self._levels.values() for heap in level.heaps()]
        waiting = [seq for heap in heaps for _, seq in heap if seq.state is SeqState.WAITING]
        if first is None or len(waiting) < 2:
            return first
        shortest = min(waiting, key=lambda seq: (len(seq.tokens), seq.key))
        shortest.key, first.key = first.key, shortest.key
        self.__init__()  # type: ignore[misc]
        for seq in waiting:
            self.push(seq)
        return shortest

    real = WaitQueue.peek
    patch.setattr(WaitQueue, "peek", pop_shortest)


def ended_in_the_queue_is_still_counted(patch: Patch) -> None:
    patch.setattr(WaitQueue, "forget", lambda self: None)


def head_of_the_queue_never_fits(patch: Patch) -> None:
    """A full pool's worth of slack is asked of a resumed sequence: it waits for ever once it is alone."""
    wrap(
        patch, Admission, "_pages_wanted",
        lambda real: lambda self, seq, *rest: (
            real(self, seq, *rest) + (self.live.config.n_pages if seq.last_step >= 0 else 0)
        ),
    )  # fmt: skip


BUGS: list[Bug] = [
    value for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name not in ("wrap",)
]  # fmt: skip
