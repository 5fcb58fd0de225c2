"""Data-parallel ranks under one scheduler: each has its pages, slots and tokens, and every sequence says what the
reference says, whichever rank it is on. The devices are null devices, one a rank, each given its part of every plan."""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from beam_model import BeamLedger
from control_checks import held_by, pages_of
from control_machine import BASE, GRAMMAR, FaultyDevice, as_bits
from control_model import VOCAB, layout_of, may_follow
from kept_states import KeepsStates, States, check_places

from quire.control import admission, snapshots
from quire.control.beam_search import BeamSearch
from quire.control.cache import PageCache
from quire.control.config import SchedulerConfig
from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq, SeqState
from quire.core.beams import BeamTerms
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError, ContextLengthExceeded, EngineError
from quire.core.failure import Code, Failure
from quire.core.plan import StepMasks, StepPlan
from quire.core.plan_parts import joined, masks_of, part_of, rows_of
from quire.core.request import Pooling, Request, pooling_params
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams
from quire.planner.pace import Pace

LONG = [1, 2, 2, 1] * 8


def config_of(**changes: object) -> SchedulerConfig:
    values = {
        "n_pages": 13, "page_size": 4, "n_dp_ranks": 2, "max_num_seqs": 4, "max_num_batched_tokens": 12,
        "max_model_len": 40, "kv": layout_of(0), **changes,
    }  # fmt: skip
    return SchedulerConfig(**values)  # type: ignore[arg-type]


class PartDevice(FaultyDevice):
    """That of one rank, which may have no rows of a step."""

    def _run_spans(self, plan: StepPlan, result: StepResult, allowed: Any) -> None:
        if plan.spans:
            super()._run_spans(plan, result, allowed)


class StatefulPart(KeepsStates, PartDevice):
    """Of a model with recurrent states."""


class Rig:
    """A scheduler, and a device for each rank."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.n_slots, clock = config, config.max_num_seqs, VirtualClock()
        self.scheduler = Scheduler(config, clock)
        kind = StatefulPart if config.has_states else PartDevice
        self.devices = [
            kind(
                n_pages=config.n_pages, page_size=config.page_size, max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len, vocab_size=VOCAB, clock=clock, depth=config.pipeline_depth,
                windows=config.kv.windows,
            )
            for _ in range(config.n_dp_ranks)
        ]  # fmt: skip
        for device in self.devices:
            if isinstance(device, StatefulPart):
                device.states = States()
        self.ledger = BeamLedger(config.kv.windows)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.most_rows = [0] * config.n_dp_ranks

    def submit(self, request: Request) -> None:
        number = self.scheduler.live.n_submitted
        request.request_id, request.seed = f"r{number}", number * 10
        self.scheduler.submit(request)
        self.ledger.add(request, number, request.priority if self.config.policy == "priority" else 0)

    def turn(self) -> StepPlan | None:
        decoding = [seq for seq in self.running() if seq.prefill_end <= seq.planned < seq.limit]
        plan = self.scheduler.schedule()
        if plan is not None:
            live = self.scheduler.live
            left_out = [seq for seq in decoding if seq.state is SeqState.RUNNING and seq.last_step < plan.step]
            for seq in left_out:
                last = live.last_running(seq.dp_rank)
                gives_way = seq is last or (seq.search is not None and seq.search is last.search)
                assert gives_way, "a decoding sequence was left out"
            ranks = [{member.dp_rank for member in search.members} for search in live.searches.values()]
            assert all(len(own) == 1 for own in ranks), "beams are on several ranks"
            self.in_flight.append((plan, self._run(plan)))
        if self.in_flight and (plan is None or len(self.in_flight) >= self.config.pipeline_depth):
            for delta in self.scheduler.commit(self.in_flight.popleft()[1]):
                self.ledger.hear(delta, may_fail=True)
        self.check()
        return plan

    def _run(self, plan: StepPlan) -> StepResult:
        n = self.n_slots
        rows = rows_of(plan, len(self.devices), n)
        assert sum(rows) == plan.n_tokens and max(rows) <= self.config.max_num_batched_tokens
        self.most_rows = list(map(max, self.most_rows, rows))
        parts = [part_of(plan, dp_rank, n) for dp_rank in range(len(self.devices))]
        assert [part.n_tokens for part in parts] == rows
        hints = [set(slots) <= set(part.spans.slots) for part in parts for slots, _ in part.shared_prefixes]
        assert all(hints) and len(hints) == len(plan.shared_prefixes)
        futures = [device.submit(part) for device, part in zip(self.devices, parts, strict=True)]
        bits = b""
        for span in plan.masked:
            dp_rank, slot = divmod(plan.spans.slots[span], n)
            bits += as_bits(may_follow(self.devices[dp_rank]._slots[slot].tokens))
        for dp_rank, (device, part, future) in enumerate(zip(self.devices, parts, futures, strict=True)):
            if part.masked and not future.done():
                device.mask(masks_of(StepMasks(plan.step, bits), plan, dp_rank, n))
        return joined(plan, [future.result() for future in futures], n)

    def check(self) -> None:
        """Slots and pages of each rank are held by its own sequences alone, and counted."""
        live = self.scheduler.live
        for dp_rank, cache in enumerate(live.caches):
            own = [seq for seq in live.running if seq.dp_rank == dp_rank]
            first = dp_rank * self.n_slots
            slots = [seq.slot for seq in own] + live.free_slots[dp_rank]
            assert sorted(slots) == list(range(first, first + self.n_slots)) and live.n_running(dp_rank) == len(own)
            nodes = [node for root in cache.tree.roots.values() for node in cache.tree.subtree(root)]
            owners = Counter(page for node in nodes for page in pages_of(node))
            for seq in own:
                owners.update(held_by(seq))
            if cache.snapshots is not None:
                check_places(cache, own)
            assert owners == Counter({page: n for page, n in enumerate(cache.pool.refs) if n}), "pages are miscounted"
        stats = self.scheduler.stats()
        assert stats.n_pages_free == sum(cache.n_available for cache in live.caches)
        assert stats.dp_running == [sum(seq.dp_rank == one for seq in live.running) for one in range(len(live.caches))]
        assert stats.dp_pages_free == [cache.n_available for cache in live.caches]
        assert stats.n_running == len(live.running) and len(stats.page_map) == len(live.caches) * self.config.n_pages

    def drain(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work():
                break
            self.turn()
        live = self.scheduler.live
        assert not self.scheduler.has_work() and not self.ledger.live() and not live.running
        assert all(cache.n_available == self.config.n_usable_pages for cache in live.caches)

    def running(self) -> list[Seq]:
        return self.scheduler.live.running


def plain(prompt: list[int], max_tokens: int = 8, **options: object) -> Request:
    return Request(
        request_id="", prompt_token_ids=prompt, params=SamplingParams(**options), max_tokens=max_tokens, seed=0  # type: ignore[arg-type]
    )  # fmt: skip


def any_request(rng: random.Random, *, has_states: bool) -> Request:
    prompt = BASE[: rng.randint(1, 18)] + rng.choices([1, 2], k=rng.randint(0, 2))
    if rng.random() < 0.25 and not has_states:
        width = rng.choice([1, 2, 2, 3])
        search = plain(prompt, rng.randint(1, 10), n=rng.randint(1, width), logprobs=rng.choice([None, 2]))
        search.beams = BeamTerms(width, rng.choice([0.0, 1.0, -1.0]), rng.choice([False, True, "never"]))
        search.end_token_ids, search.priority = rng.choice([[], [5]]), rng.randint(0, 2)
        return search
    if rng.random() < 0.1:
        pooling = rng.choice(list(Pooling))
        return Request(
            request_id="", prompt_token_ids=prompt, params=pooling_params(), max_tokens=1, seed=0, pooling=pooling
        )  # fmt: skip
    request = plain(
        prompt, rng.randint(1, 12), n=rng.choice([1, 1, 1, 3]), logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, 1]), structured_outputs=rng.choice([None, GRAMMAR]),
        stop_token_ids=rng.choice([[], [3]]),
    )  # fmt: skip
    request.priority, request.cache_salt = rng.randint(0, 2), rng.choice(["", "", "b"])
    return request


def traffic(seed: int, windows: tuple[int, ...], *, has_states: bool) -> Counter[str]:
    """Samples, beams, vectors, faults, and recurrent states with snapshots of each rank; what of it there was."""
    rng, counts = random.Random(seed), Counter[str]()
    rig = Rig(config_of(
        kv=layout_of(*windows), n_pages=rng.choice([9, 13]) * len(windows), n_dp_ranks=rng.choice([2, 3]),
        pipeline_depth=rng.choice([1, 2, 3]), policy=rng.choice(["fcfs", "priority"]), min_shared_tokens=1,
        long_prefill_token_threshold=rng.choice([0, 5]),
        pace=rng.choice([None, Pace(factor=1.5, weights_s=2, token_s=1, cached_s=0.1, pair_s=0.1, min_tokens=1)]),
        has_states=has_states, n_snapshots=rng.choice([2, 6]) if has_states else 0,
    ))  # fmt: skip
    for _ in range(60):
        if rng.random() < 0.4:
            with contextlib.suppress(ContextLengthExceeded):
                rig.submit(any_request(rng, has_states=has_states))
        if rng.random() < 0.03:
            rng.choice(rig.devices).armed = rng.randint(0, 3)
        if rng.random() < 0.05 and rig.ledger.live():
            name = rng.choice(rig.ledger.live()).request.request_id
            rig.scheduler.cancel(name)
            rig.ledger.end(name)
        if rng.random() < 0.01:
            for delta in rig.scheduler.retry_all():
                rig.ledger.hear(delta, may_fail=True)
            rig.in_flight.clear()
        plan = rig.turn()
        counts["restored"] += 0 if plan is None else len(plan.restores)
        searches = rig.scheduler.live.searches.values()
        counts["beams"] += sum(len(search.members) > 1 and search.root.dp_rank > 0 for search in searches)
    rig.drain()
    assert sum(map(bool, rig.most_rows)) > 1, "one rank alone had something to do"
    counts["preempted"], counts["faults"] = rig.scheduler.live.preemptions, rig.scheduler.live.finished["error"]
    return counts


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_TOKENS", 8)


@pytest.mark.parametrize("windows, has_states", [((0,), False), ((0, 3), False), ((0,), True)])
def test_every_sequence_says_what_the_reference_says(windows: tuple[int, ...], has_states: bool, near: None) -> None:
    counts = sum((traffic(seed, windows, has_states=has_states) for seed in range(16)), Counter[str]())
    assert counts["preempted"] > 5 and counts["faults"] > 2 and counts["restored" if has_states else "beams"] > 10


@pytest.mark.parametrize("seed, windows", [(275, (0,)), (303, (0,)), (355, (0, 3))])
def test_what_was_found_once(seed: int, windows: tuple[int, ...], near: None) -> None:
    """Two faults, one after the other; a sample that lacks logprobs of its prompt beside one that needs none; a search
    that gives way in a step in which others enter elsewhere."""
    traffic(seed, windows, has_states=False)


def beams_enter_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    def new_member(self: LiveSeqs, search: BeamSearch) -> Seq:
        member = real(self, search)
        member.dp_rank = 0
        return member

    real = LiveSeqs.new_member
    patch.setattr(LiveSeqs, "new_member", new_member)


def parts_lose_copies_of_beams(patch: pytest.MonkeyPatch) -> None:
    real = part_of
    patch.setitem(globals(), "part_of", lambda *given: msgspec.structs.replace(real(*given), copies=[]))


def parts_do_not_go_on_from_snapshots(patch: pytest.MonkeyPatch) -> None:
    real = part_of
    patch.setitem(globals(), "part_of", lambda *given: msgspec.structs.replace(real(*given), restores=[]))


def a_snapshot_is_looked_for_on_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    def save(self: PlanBuilder, cache: PageCache, seq: Seq, start: int) -> None:
        firsts.append(cache)
        real(self, firsts[0], seq, start)

    firsts: list[PageCache] = []
    real = PlanBuilder.save
    patch.setattr(PlanBuilder, "save", save)


@pytest.mark.parametrize("bug, has_states", [
    (beams_enter_the_first_rank, False), (parts_lose_copies_of_beams, False), (parts_do_not_go_on_from_snapshots, True),
    (a_snapshot_is_looked_for_on_the_first_rank, True),
])  # fmt: skip
def test_bugs_are_caught(
    bug: Callable[[pytest.MonkeyPatch], None], has_states: bool, near: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError, ValueError, KeyError)):
        for seed in range(16):
            traffic(seed, (0,), has_states=has_states)


def test_all_can_be_sent_back() -> None:
    rig = Rig(config_of())
    for tail in range(8):
        rig.submit(plain([*LONG[:8], tail % 3]))
    for _ in range(3):
        rig.turn()
    assert len({seq.dp_rank for seq in rig.running()}) == 2
    assert rig.scheduler.retry_all() == []
    rig.in_flight.clear()
    rig.drain()
    rig.submit(plain(LONG[:8]))
    rig.turn()
    for delta in rig.scheduler.fail_all(Failure(Code.ENGINE_ERROR, "the device failed")):
        rig.ledger.hear(delta, may_fail=True)
    rig.in_flight.clear()
    rig.submit(plain(LONG[:8]))
    rig.drain()


def test_a_prompt_goes_where_its_beginning_is() -> None:
    rig = Rig(config_of(n_pages=40))
    one, other = LONG[:16], [2] * 16
    for prompt in (one, other):
        rig.submit(plain(prompt, 1))
    rig.drain()
    for prompt in (other, one, one, other):
        rig.submit(plain([*prompt, 1]))
    rig.turn()
    ranks = [seq.dp_rank for seq in rig.running()]
    assert ranks[0] == ranks[3] != ranks[1] == ranks[2] and all(seq.cached == 16 for seq in rig.running())


def test_a_beginning_that_all_share_does_not_bring_all_to_one_rank() -> None:
    rig = Rig(config_of(n_pages=400, max_num_seqs=40, max_num_batched_tokens=80))
    rig.submit(plain(LONG, 1))
    rig.drain()
    for tail in range(40):
        rig.submit(plain([*LONG, tail % 3], 4))
    while len(rig.scheduler.live.waiting):
        rig.turn()
    counts = Counter(seq.dp_rank for seq in rig.running())
    assert abs(counts[0] - counts[1]) <= admission.MOST_AHEAD + 1
    rig.drain()


def test_samples_stay_with_their_sibling_and_memory_is_short_on_one_rank_alone() -> None:
    rig = Rig(config_of(n_pages=9))
    rig.submit(plain(LONG[:6], 24, n=2))
    rig.submit(plain([2, 2, 2, 1], 28))
    first_ranks = dict[Seq, int]()
    victims = list[int]()
    while rig.scheduler.has_work():
        before = {seq: seq.dp_rank for seq in rig.running()}
        n_available = [cache.n_available for cache in rig.scheduler.live.caches]
        rig.turn()
        gone = [dp_rank for seq, dp_rank in before.items() if seq.state is SeqState.WAITING]
        assert all(n_available[dp_rank] < 2 for dp_rank in gone), "it gave way for another rank"
        if gone and not victims:
            assert max(n_available) > 2, "the other rank has pages"
        victims += gone
        for seq in rig.running():
            first_ranks.setdefault(seq, seq.dp_rank)
    samples = [dp_rank for seq, dp_rank in first_ranks.items() if seq.request.params.n == 2]
    assert len(first_ranks) == 3 and len(set(samples)) == 1 and len(set(first_ranks.values())) == 2
    assert victims
    rig.drain()


def test_samples_that_find_no_room_beside_their_sibling_enter_elsewhere() -> None:
    rig = Rig(config_of(n_pages=60, max_num_batched_tokens=16))
    rig.submit(plain(LONG[:8], 12, n=6))
    for _ in range(6):
        rig.turn()
    assert sorted(seq.dp_rank for seq in rig.running()) == [0, 0, 0, 0, 1, 1]
    rig.drain()


def test_what_is_not_done_is_refused() -> None:
    for options in ({"num_speculative_tokens": 2}, {"n_stages": 2}):
        with pytest.raises(ConfigError, match="neither drafts nor stages of a pipeline"):
            config_of(**options)


def test_a_sample_without_room_beside_its_sibling_holds_nobody_up() -> None:
    """The sibling's rank is full for long; the other one has become empty."""
    rig = Rig(config_of(n_pages=200, max_num_seqs=2, max_num_batched_tokens=30, max_model_len=400))
    for max_tokens, prompt in ((6, [1, 2, 2, 1]), (380, [2, 2, 2, 1]), (6, [1, 1, 2, 1])):
        rig.submit(plain(prompt, max_tokens))
    rig.turn()
    rig.submit(plain([2, 1, 2, 1, 2, 2], 380, n=2))
    for _ in range(5):
        rig.submit(plain([2, 2], 3))
    n_turns = 0
    while rig.scheduler.live.waiting:
        rig.turn()
        n_turns += 1
        assert n_turns < 60


def test_prompts_wait_behind_each_other_wherever_there_is_room() -> None:
    """Two decode, one on each rank; four wait, for whom there is room on both: three behind the first, which is as many
    as one for each that decodes. A token costs 1, so a rank's step of one token may take ten."""
    pace = Pace(factor=2.0, weights_s=0.0, token_s=1.0, cached_s=0.0, pair_s=0.0, waiting_weight=8.0, min_tokens=1)
    for n_free, most in ((3, 10), (1, 2 + 4)):
        rig = Rig(config_of(n_pages=60, max_num_seqs=1 + n_free, max_num_batched_tokens=12, pace=pace))
        for i in range(2):
            rig.submit(Request(request_id="", prompt_token_ids=[i] * 9, params=SamplingParams(), max_tokens=9, seed=0))
        rig.turn()
        for i in range(4):
            rig.submit(Request(request_id="", prompt_token_ids=[i] * 20, params=SamplingParams(), max_tokens=2, seed=0))
        plan = rig.turn()
        assert plan is not None
        rows = [sum(part_of(plan, rank, 1 + n_free).spans.lengths) for rank in range(2)]
        assert rows == [most, most]
        rig.drain()
