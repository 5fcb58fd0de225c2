"""Single cases of the scheduler, each a promise that people rely on."""

from __future__ import annotations

from collections import deque

import pytest

from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.control.slot_params import slot_params
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError, ContextLengthExceeded, EngineError, InvalidParameter, QueueFull, RequestError
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code, Failure
from quire.core.plan import StepPlan
from quire.core.request import MAX_SALT_CHARS, Pooling, Request, pooling_params
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams
from quire.engine.executors.digests import null_reference
from quire.engine.executors.null import NullExecutor

VOCAB = 100


class Rig:
    """A scheduler and a null device, turned by hand."""

    def __init__(self, **limits: object) -> None:
        values = {
            "n_pages": 65, "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128,
            "pipeline_depth": 1, **limits,
        }  # fmt: skip
        self.config = SchedulerConfig(**values)  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self.scheduler = Scheduler(self.config, self.clock)
        self.device = NullExecutor(
            n_pages=self.config.n_pages,
            page_size=self.config.page_size,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.config.max_model_len,
            vocab_size=VOCAB,
            clock=self.clock,
            windows=self.config.kv.windows,
        )
        self.results: deque[StepResult] = deque()
        self.said: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int = 4, *, n: int = 1, **fields: object) -> Request:
        params = fields.pop("params", None) or SamplingParams(n=n)
        request = Request(
            request_id=name, prompt_token_ids=prompt, params=params, max_tokens=max_tokens, seed=7, **fields
        )  # type: ignore[arg-type]
        self.scheduler.submit(request)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.results.append(self.device.submit(plan).result())
        return plan

    def commit(self) -> list[SeqDelta]:
        deltas = self.scheduler.commit(self.results.popleft())
        for delta in deltas:
            name = (delta.request_id, delta.index)
            self.said.setdefault(name, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[name] = delta.finish_reason
        return deltas

    def turn(self) -> StepPlan:
        plan = self.plan()
        self.commit()
        return plan

    def run(self) -> None:
        while self.scheduler.has_work():
            self.turn()
        stats = self.scheduler.stats()
        assert stats.n_pages_free == stats.n_pages and stats.n_running == stats.n_waiting == 0

    def check(self, request: Request) -> None:
        for index in range(request.params.n):
            expected = null_reference(request.prompt_token_ids, slot_params(request, index), request.max_tokens, VOCAB)
            assert self.said[request.request_id, index] == expected


@pytest.mark.parametrize(("n_pages", "max_tokens"), [(2, 1), (3, 2)])
def test_the_smallest_pool_completes(n_pages: int, max_tokens: int) -> None:
    rig = Rig(n_pages=n_pages, page_size=1, max_num_seqs=1, max_num_batched_tokens=1)
    requests = [rig.submit(name, [5], max_tokens) for name in "abc"]
    rig.run()
    for request in requests:
        rig.check(request)


def test_what_can_never_fit_is_refused_at_once() -> None:
    rig = Rig(n_pages=4, page_size=4)
    rig.submit("fits", [1] * 8, 5)
    with pytest.raises(ContextLengthExceeded, match="need 4 KV pages, the pool has 3"):
        rig.submit("pool", [1] * 8, 6)
    with pytest.raises(ContextLengthExceeded, match=r"prompt \(120\) plus output \(9\) is 129 tokens"):
        rig.submit("context", [1] * 120, 9)
    with pytest.raises(InvalidParameter, match="prompt_token_ids"):
        rig.submit("empty", [])
    with pytest.raises(InvalidParameter, match="max_tokens"):
        rig.submit("none", [1], 0)
    with pytest.raises(RequestError, match="id"):
        rig.submit("fits", [1])
    assert rig.scheduler.stats().n_waiting == 1
    rig.run()


def test_the_queue_is_bounded_in_sequences() -> None:
    """Free slots are room too: what idle slots and the queue hold together is never told to come again."""
    rig = Rig(max_num_waiting=3, max_num_seqs=2)
    with pytest.raises(
        InvalidParameter, match=r"^n = 6 is not allowed.* at most 5, 2 that run and 3 that wait\. .*--max-num-seqs"
    ):
        rig.submit("never", [1], n=6)
    rig.submit("a", [1], n=5)
    with pytest.raises(QueueFull, match="0 sequences run and 5 wait: 1 more"):
        rig.submit("b", [1])
    rig.scheduler.schedule()
    with pytest.raises(QueueFull, match="1 sequences run and 4 wait: 1 more exceed 2 slots"):
        rig.submit("c", [1])
    rig.scheduler.cancel("a")
    rig.submit("d", [1], n=2)
    rig.submit("e", [1], n=3)


def test_context_is_used_to_the_last_token() -> None:
    rig = Rig()
    request = rig.submit("a", [1] * 127, 1)
    rig.run()
    rig.check(request)


def test_decodes_go_before_prompts_and_prompts_are_cut() -> None:
    """A long prompt does not stall a sequence that decodes (Sarathi-Serve)."""
    rig = Rig(max_num_batched_tokens=8)
    rig.submit("short", [1, 2, 3], 20)
    rig.turn()
    rig.submit("long", [9] * 40, 2)
    for i in range(5):
        plan = rig.turn()
        assert plan.spans.slots[0] == 0 and plan.spans.lengths[0] == 1
        assert plan.spans.lengths[1] == 7 and plan.spans.wants == [True, False], i
    rig.run()


def test_one_prompt_takes_at_most_its_threshold() -> None:
    rig = Rig(long_prefill_token_threshold=5, enable_prefix_caching=False)
    rig.submit("a", [1] * 12, 1)
    rig.submit("b", [2] * 12, 1)
    assert [rig.turn().spans.lengths for _ in range(3)] == [[5, 5], [5, 5], [2, 2]]
    rig.run()


def test_a_prompt_is_found_in_the_plan_that_writes_it() -> None:
    rig = Rig()
    first, second = rig.submit("a", [1] * 17, 2), rig.submit("b", [*[1] * 16, 2], 2)
    plan = rig.turn()
    assert plan.spans.starts == [0, 16] and plan.spans.lengths == [17, 1]
    rig.run()
    rig.check(first)
    rig.check(second)
    assert rig.scheduler.stats().prefix_hits == 16 and rig.scheduler.stats().prefix_queries == 34


def test_a_whole_prompt_hit_computes_one_token_at_least() -> None:
    rig = Rig(page_size=1)
    rig.submit("a", [1, 2, 3, 4])
    rig.run()
    request = rig.submit("b", [1, 2, 3, 4])
    plan = rig.plan()
    assert plan.spans.starts == [3] and plan.spans.lengths == [1]
    assert rig.commit()[0].n_cached == 3
    rig.run()
    rig.check(request)


def test_salts_separate_tenants() -> None:
    rig = Rig()
    rig.submit("a", [1] * 16, cache_salt="a")
    rig.run()
    rig.submit("b", [1] * 16, cache_salt="b")
    assert rig.turn().spans.starts == [0]


@pytest.mark.parametrize(("apart", "starts"), [(False, [16, 24, 24, 0]), (True, [0, 16, 24, 0])])
def test_pages_of_deterministic_requests_are_for_their_like(apart: bool, starts: list[int]) -> None:
    """Of their prompts alone, where their bits are their own: a salt of zeros is not theirs either."""
    rig, wish = Rig(deterministic_apart=apart), SamplingParams(deterministic=True, temperature=0.0)
    rig.submit("plain", [1] * 16, 12)
    rig.run()
    text = [1] * 16 + rig.said["plain", 0]
    found = []
    for number, params in enumerate([wish, wish, SamplingParams()]):
        rig.submit(f"{number}", text[:17] if number == 0 else text[:25], 9, params=params)
        found += rig.turn().spans.starts
        rig.run()
    rig.submit("zeros", text[:17], cache_salt="\0" * MAX_SALT_CHARS)
    assert [*found, *rig.turn().spans.starts] == starts


def test_samples_share_the_prompt_and_copy_its_last_page() -> None:
    rig = Rig()
    request = rig.submit("a", [3] * 11, 6, n=3)
    assert rig.turn().spans.lengths == [11]
    plan = rig.turn()
    assert plan.spans.lengths == [1, 1, 1] and plan.spans.starts == [11, 10, 10]
    assert [(copy.source, copy.n_tokens) for copy in plan.copies] == [(3, 2), (3, 2)]
    assert [append.pages[:2] for append in plan.pages if append.first_index == 0] == [[1, 2], [1, 2]]
    rig.run()
    rig.check(request)
    assert len({tuple(said) for said in rig.said.values()}) == 3, "each sample has its own seed"


def test_samples_share_without_a_prefix_cache() -> None:
    rig = Rig(enable_prefix_caching=False)
    request = rig.submit("a", [3] * 11, 6, n=2)
    rig.run()
    rig.check(request)
    assert rig.scheduler.stats().computed_tokens == 11 + 1 + 2 * 5


def test_priority_orders_admission_and_protects() -> None:
    rig = Rig(policy="priority", max_num_seqs=1)
    for name, priority in (("low", 2), ("high", 0), ("middle", 1), ("high2", 0)):
        rig.submit(name, [ord(name[0])], 2, priority=priority)
    rig.run()
    assert [name for name, _ in rig.ends] == ["high", "high2", "middle", "low"]


def test_preemption_takes_the_latest_and_resumes_it_first() -> None:
    rig = Rig(n_pages=9, page_size=2, enable_prefix_caching=False)
    requests = [rig.submit(name, [i + 1] * 4, 9) for i, name in enumerate("ab")]
    opened: list[int] = []
    while rig.scheduler.has_work():
        if rig.scheduler.stats().preemptions == 1 and len(requests) == 2:
            requests.append(rig.submit("c", [9], 1))
        opened += [slot.token_ids[0] for slot in rig.turn().opened]
    assert opened == [1, 2, 2, 9], "the later one is preempted and comes back before the newcomer"
    for request in requests:
        rig.check(request)
    assert rig.scheduler.stats().preemptions == 1


def test_a_preempted_sequence_takes_the_token_in_flight() -> None:
    rig = Rig(n_pages=9, page_size=2, pipeline_depth=3)
    requests = [rig.submit(name, [i + 1] * 4, 9) for i, name in enumerate("ab")]
    while rig.scheduler.has_work():
        plan = rig.scheduler.schedule()
        if plan is not None:
            rig.results.append(rig.device.submit(plan).result())
        if rig.results and (plan is None or len(rig.results) == 3):
            rig.commit()
    assert rig.scheduler.stats().preemptions > 0
    for request in requests:
        rig.check(request)


def test_cancel_is_exact_idempotent_and_silent() -> None:
    rig = Rig(pipeline_depth=2)
    rig.submit("aa", [1] * 8)
    request = rig.submit("b", [2] * 8)
    rig.plan()
    rig.scheduler.cancel("a")
    rig.scheduler.cancel("aa")
    rig.scheduler.cancel("aa")
    rig.scheduler.cancel_seq("aa", 0)
    while rig.scheduler.has_work():
        if len(rig.results) < 2 and (plan := rig.scheduler.schedule()):
            rig.results.append(rig.device.submit(plan).result())
        else:
            rig.commit()
    assert ("aa", 0) not in rig.said and rig.scheduler.stats().finished["abort"] == 1
    rig.check(request)


def test_one_sample_can_end_alone() -> None:
    rig = Rig()
    request = rig.submit("a", [1] * 5, 4, n=2)
    rig.turn()
    rig.turn()
    rig.scheduler.cancel_seq("a", 1)
    rig.run()
    assert (
        len(rig.said["a", 0]) == 4
        and len(rig.said["a", 1]) == 1
        and request.request_id not in rig.scheduler.live.requests
    )
    assert rig.scheduler.stats().finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}


def test_end_tokens_end_and_are_reported() -> None:
    rig = Rig()
    prompt = [1] * 5
    tokens = null_reference(prompt, slot_params(Request(request_id="", prompt_token_ids=prompt, params=SamplingParams(), max_tokens=9, seed=7), 0), 9, VOCAB)  # fmt: skip  # noqa: E501
    rig.submit("a", prompt, 9, end_token_ids=[tokens[3]])
    rig.submit("b", prompt, 9, params=SamplingParams(stop_token_ids=[tokens[2]]))
    deltas: list[SeqDelta] = []
    while rig.scheduler.has_work():
        rig.plan()
        deltas += rig.commit()
    assert rig.said == {("a", 0): tokens[:4], ("b", 0): tokens[:3]}
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason}
    assert ends["a"].stop_token == tokens[3] and ends["b"].stop_token == tokens[2]
    assert set(rig.ends.values()) == {FinishReason.STOP}


def test_fail_all_ends_everything_once_and_trusts_no_page() -> None:
    rig = Rig(pipeline_depth=2)
    rig.submit("a", [1] * 9, n=2)
    rig.plan()
    rig.plan()
    gone = Failure(Code.ENGINE_ERROR, "gone")
    deltas = rig.scheduler.fail_all(gone)
    assert [(delta.index, delta.finish_reason, delta.failure) for delta in deltas] == [
        (0, FinishReason.ERROR, gone), (1, FinishReason.ERROR, gone)
    ]  # fmt: skip
    assert not rig.scheduler.has_work() and rig.scheduler.stats().n_pages_cached == 0
    assert rig.commit() == [] and rig.commit() == [], "late results are ignored"
    request = rig.submit("b", [1] * 9)
    rig.run()
    rig.check(request)


def test_a_large_head_is_not_starved_by_small_ones() -> None:
    """Strict order: while the head waits for pages nobody passes, so that it enters when those before it have ended."""
    rig = Rig(n_pages=9)
    for i in range(2):
        rig.submit(f"before{i}", [i] * 8, 3)
    rig.turn()
    rig.submit("large", [9] * 28, 3)
    opened: list[int] = []
    for i in range(10):
        rig.submit(f"after{i}", [20 + i] * 2, 1)
        opened += [slot.token_ids[0] for slot in rig.turn().opened]
        assert opened or i < 4, "those before it have ended by now"
    assert opened[0] == 9
    rig.run()


def test_results_of_another_step_are_refused() -> None:
    rig = Rig()
    with pytest.raises(EngineError, match="expected was none"):
        rig.scheduler.commit(StepResult(3))
    rig.submit("a", [1])
    rig.plan()
    with pytest.raises(EngineError, match="0 counts"):
        rig.scheduler.commit(StepResult(0))


def test_idle_and_stalled_can_be_told_apart() -> None:
    rig = Rig()
    rig.clock.advance(100)
    assert rig.scheduler.stats().last_step_age_s == 0
    rig.submit("a", [1], 3)
    rig.clock.advance(2)
    assert rig.scheduler.stats().last_step_age_s == 2
    rig.turn()
    assert rig.scheduler.stats().last_step_age_s == 0


def test_stats_of_a_large_pool_stay_small() -> None:
    rig = Rig(n_pages=10_001, max_num_batched_tokens=100)
    rig.submit("a", [1] * 100, 4)
    rig.turn()
    stats = rig.scheduler.stats()
    assert len(stats.page_map) <= 4096 and max(stats.page_map) == 2
    held = {page // 3 for seq in rig.scheduler.live.running for page in seq.tables[0]}
    assert {i for i, cell in enumerate(stats.page_map) if cell > 1} == held
    assert stats.n_tokens_held == 100 and stats.n_slots_taken == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_pages", 1), ("page_size", 0), ("max_num_batched_tokens", 7), ("pipeline_depth", 0), ("policy", "lifo")],
)
def test_a_config_that_cannot_work_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Rig(**{field: value})


@pytest.mark.parametrize("pooling", list(Pooling))
def test_a_vector_instead_of_tokens(pooling: Pooling) -> None:
    """In chunks, beside a request for tokens, and again from the cache: LAST may use it, MEAN computes every token."""
    rig = Rig(max_num_batched_tokens=8)
    prompt = [3 * i % VOCAB for i in range(30)]
    for name in ("first", "again"):
        rig.submit(f"beside {name}", [1, 2, 3], 6)
        rig.submit(name, prompt, 1, params=pooling_params(), pooling=pooling)
        deltas: list[SeqDelta] = []
        while rig.scheduler.has_work():
            plan = rig.plan()
            spans = zip(plan.spans.slots, plan.spans.wants, strict=True)
            assert sum(wants for _, wants in spans) <= 1, "only the request beside it wants tokens"
            deltas += rig.scheduler.commit(rig.results.popleft())
        found = [delta for delta in deltas if delta.request_id == name]
        assert len(found) == 1 and found[0].finish_reason is FinishReason.STOP and not found[0].token_ids
        assert found[0].pooled == ([87.0, 29.0] if pooling is Pooling.LAST else [sum(prompt) / 30, 14.5])
        assert found[0].n_cached == (28 if name == "again" and pooling is Pooling.LAST else 0)
    assert not rig.scheduler.live.requests


def test_a_result_without_the_vector_is_an_error() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3], 1, params=pooling_params(), pooling=Pooling.LAST)
    rig.plan()
    rig.results[0].pooled.clear()
    with pytest.raises(EngineError, match="vector"):
        rig.scheduler.commit(rig.results.popleft())
