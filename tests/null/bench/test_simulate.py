"""`quire simulate`: the engine's decisions do not depend on what the timed device says; time, routers, baselines."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import random
from collections.abc import Callable, Sequence

import pytest

from quire.bench.shape import FOLDER
from quire.bench.simulate.baselines import DynamicBatching, PagedWhole, Policy, Reserved, StaticBatching
from quire.bench.simulate.figures import Slo, figures, gap_percentiles, parse_slo
from quire.bench.simulate.fleet import Fleet
from quire.bench.simulate.options import SimulateOptions
from quire.bench.simulate.record import Outcome, Run, StepLog
from quire.bench.simulate.replica import EngineReplica
from quire.bench.simulate.requests import (
    SimRequest,
    at_rate,
    nano_vllm_lengths,
    of_lengths,
    sharegpt_lengths,
    stretched,
    workload_requests,
)
from quire.bench.simulate.router import LeastLoaded, RoundRobin, ServerRouter, router_named
from quire.bench.simulate.session import Variant, baselines, capacity
from quire.bench.workloads import throughput_dataset
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.core.clock import VirtualClock
from quire.core.commands import Submit
from quire.core.errors import ConfigError
from quire.core.plan import Spans, StepPlan
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.core import EngineCore
from quire.engine.executors.null import NullExecutor
from quire.engine.executors.null_timed import TimedNullExecutor
from quire.engine.simulated import SimulatedMachine
from quire.planner.formats import formats_named
from quire.planner.parts import rank_parts
from quire.planner.shape import kv_numbers_per_token

RESULTS = pathlib.Path(__file__).parents[3] / "benchmarks/results/h200"
GIB = 1 << 30
ARCH = read_arch(FOLDER / "qwen3-0.6b")


@dataclasses.dataclass(frozen=True)
class FlatCost:
    """A step takes a second, whatever is in it; or a second for each row."""

    a_row: bool = False
    first_token_s: float = 0.0

    def step_s(self, spans: Spans, shared_prefixes: object = ()) -> float:
        return float(sum(spans.lengths)) if self.a_row else 1.0


def machine(is_server: bool = False, cost: object = None, **options: object) -> SimulatedMachine:
    values: dict[str, object] = {"model": "", "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    config = EngineConfig(**(values | options))  # type: ignore[arg-type]
    made = SimulatedMachine.of(config, ARCH, "h200", 141 * GIB, is_server=is_server)
    return made if cost is None else dataclasses.replace(made, cost=cost)  # type: ignore[arg-type]


def mixed_requests(n: int, rate: float = 200.0) -> list[SimRequest]:
    rng = random.Random(1)
    lengths = [(rng.randint(1, 300), rng.randint(1, 60)) for _ in range(n)]
    return at_rate(of_lengths(lengths, prefix_len=64, n_prefixes=3), rate, 0.5, 0)


def one_run(replica: object, requests: list[SimRequest]) -> Run:
    return Fleet([replica], RoundRobin(1)).run(requests)  # type: ignore[list-item]


# ---- the real scheduler -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_pages", [0, 90])
def test_plans_are_those_of_the_device_that_checks_every_page(n_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same requests at the same steps: the null device that reads K/V back through the page tables gets the same
    plans, whatever its tokens are, also where pages are short and sequences are preempted and come back."""
    made = machine(num_gpu_blocks_override=n_pages, max_model_len=1024 if not n_pages else 448)
    seen: list[tuple[int, Spans, list[int]]] = []
    submit = TimedNullExecutor.submit

    def note(self: TimedNullExecutor, plan: StepPlan) -> object:
        seen.append((plan.step, plan.spans, [page for one in plan.pages for page in one.pages]))
        return submit(self, plan)

    monkeypatch.setattr(TimedNullExecutor, "submit", note)
    requests = [dataclasses.replace(one, arrival_s=0.0) for one in mixed_requests(40)]
    run = one_run(EngineReplica(made), requests)
    assert all(one.is_done for one in run.outcomes) and bool(run.logs[0].preemptions) == bool(n_pages)

    core = made.engine().core
    checked: list[tuple[int, Spans, list[int]]] = []
    executor = NullExecutor(
        n_pages=made.n_pages, page_size=16, max_num_seqs=16, max_model_len=1024, vocab_size=1 << 40,
        clock=VirtualClock(), windows=made.layout.windows,
    )  # fmt: skip
    again = EngineCore(core.scheduler, executor, VirtualClock(), made.config.pipeline_depth)
    again.on_plan = lambda builders: checked.append(
        (builders[-1].plan.step, builders[-1].plan.spans, [p for one in builders[-1].plan.pages for p in one.pages])
    )
    for number, one in enumerate(requests):
        params = SamplingParams(max_tokens=one.output_len, ignore_eos=True)
        again.handle(
            Submit(
                Request(
                    request_id=str(number), prompt_token_ids=one.prompt(number), params=params,
                    max_tokens=one.output_len, seed=number,
                )
            )
        )  # fmt: skip
    while again.has_work():
        assert all(delta.failure is None for delta in again.step())
    assert len(seen) > 50 and checked == seen


@pytest.mark.parametrize("name", ["w1", "w5"])
def test_every_step_is_the_one_that_was_recorded_on_a_gpu(name: str) -> None:
    """An H200's step of 6 ms, or the roofline's of 5: with all requests at once, plans do not depend on time."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    known = {key: value for key, value in report["config"].items() if key in EngineConfig.__struct_fields__}
    folder = FOLDER / report["config"]["model"].rpartition("/")[2]
    config = EngineConfig(**(known | {"model": str(folder)}))
    made = SimulatedMachine.of(config, read_arch(folder), "h200", 141 * GIB, is_server=False)
    run = one_run(EngineReplica(made), workload_requests(name.upper(), ""))
    columns, line = run.logs[0].timeline.columns(), report["timeline"]
    assert len(line["time_s"]) > 60
    for column in ("n_tokens", "n_prefill_tokens", "n_running", "n_waiting"):
        assert columns[column] == line[column], column


def test_time_passes_as_on_a_device_with_two_steps_in_flight() -> None:
    """A step a second. The prompt's token comes with its step; the second request, which comes while step 0 runs and
    step 1 waits behind it, is in the third."""
    requests = [SimRequest(10.0, 20, 3), SimRequest(10.5, 20, 2)]
    first, second = one_run(EngineReplica(machine(cost=FlatCost())), requests).outcomes
    assert (first.first_s, first.end_s) == (11.0, 13.0)
    assert (second.first_s, second.end_s) == (13.0, 14.0)
    assert first.tpot_s == 1.0 and second.ttft_s == 2.5 and second.e2e_s == 3.5


def test_a_shared_prefix_is_found_and_counted() -> None:
    requests = of_lengths([(16, 4)] * 8, prefix_len=160)
    requests[0].arrival_s = 0.0
    for one in requests[1:]:
        one.arrival_s = 1000.0
    run = one_run(EngineReplica(machine(cost=FlatCost())), requests)
    assert run.outcomes[0].n_cached == 0 and {one.n_cached for one in run.outcomes[1:]} == {160}
    found = figures(run)
    assert found["prefix_hit_rate"] == pytest.approx(7 * 160 / (8 * 176))
    untreed = one_run(EngineReplica(machine(cost=FlatCost(), enable_prefix_caching=False)), requests)
    assert figures(untreed)["prefix_hit_rate"] is None or not figures(untreed)["prefix_hit_rate"]


def test_decodes_give_back_the_pages_behind_a_window() -> None:
    """They are committed in a loop of their own. With windows of 512 tokens most groups stay small."""
    arch = read_arch(FOLDER / "gemma-3-1b")
    made = SimulatedMachine.of(EngineConfig(max_model_len=4096), arch, "h200", 141 * GIB, is_server=False)
    run = one_run(EngineReplica(dataclasses.replace(made, cost=FlatCost())), of_lengths([(10, 3000)]))  # type: ignore[arg-type]
    n_windows = len(made.layout.windows) - made.layout.n_full
    assert n_windows > 1 and run.logs[0].most_taken < 3100 * made.layout.n_full + 600 * n_windows


def test_what_the_engine_refuses_is_counted_and_the_rest_goes_on() -> None:
    requests = of_lengths([(2000, 10), (10, 10), (1020, 10)])
    outcomes = one_run(EngineReplica(machine()), requests).outcomes
    assert [one.refusal for one in outcomes] == ["context_length_exceeded", "", "context_length_exceeded"]
    found = figures(Run(outcomes, []), Slo(ttft_s=math.inf))
    assert (found["refused"], found["completed"], found["slo_attainment"]) == (2, 1, 1 / 3)
    waiting = one_run(EngineReplica(machine(max_num_waiting=3, max_num_seqs=2)), of_lengths([(10, 10)] * 9)).outcomes
    assert sum(one.refusal == "overloaded" for one in waiting) == 4


def test_what_cannot_be_simulated_is_refused() -> None:
    for options, words in (
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "drafts"),
        ({"quantization": "int8-g32"}, "works on the CPU only"),
    ):
        with pytest.raises(ConfigError, match=words):
            machine(**options)
    with pytest.raises(ConfigError, match="weights take"):
        SimulatedMachine.of(EngineConfig(), ARCH, "h200", GIB, is_server=False)
    with pytest.raises(ConfigError, match="'h2000' is unknown; did you mean h200"):
        SimulatedMachine.of(EngineConfig(), ARCH, "h2000", 141 * GIB, is_server=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rounded_weights_leave_room_for_pages_and_are_read_sooner(ranks: int) -> None:
    """By what the planner says a rank keeps: the 0.6B has a head of its own only where it is rounded."""
    plain, fp8 = (machine(quantization=name, tensor_parallel_size=ranks) for name in ("auto", "fp8"))
    kept = [rank_parts(ARCH, Mesh(tp=ranks), formats_named(name)).weights_bytes for name in ("auto", "fp8")]
    page_bytes = 16 * kv_numbers_per_token(ARCH) * 2 // ranks
    assert (fp8.n_pages - plain.n_pages) * page_bytes == pytest.approx(kept[0] - kept[1], abs=page_bytes)
    plan = StepPlan(0, Spans())
    plan.spans.add(0, 0, 256, True)
    assert fp8.ranks_s(plan)[0] != plain.ranks_s(plan)[0]


def test_a_step_that_finds_the_device_idle_waits_for_the_host() -> None:
    requests = [SimRequest(0.0, 20, 3), SimRequest(0.5, 20, 2), SimRequest(90.0, 20, 2)]
    plain, waiting = (
        one_run(EngineReplica(machine(cost=FlatCost(first_token_s=idle_s))), requests).outcomes
        for idle_s in (0.0, 0.25)
    )
    assert [b.first_s - a.first_s for a, b in zip(plain, waiting, strict=True)] == [0.25, 0.25, 0.25]
    assert [b.end_s - a.end_s for a, b in zip(plain, waiting, strict=True)] == [0.25, 0.25, 0.25], "and no later step"


def test_ranks_share_weights_and_pages_and_wait_for_one_another() -> None:
    one, two = machine(), machine(tensor_parallel_size=2)
    assert two.n_pages > 2 * one.n_pages
    plan = StepPlan(0, Spans())
    plan.spans.add(0, 0, 32000, True)
    assert one.ranks_s(plan)[0] / 2 < two.ranks_s(plan)[0] < one.ranks_s(plan)[0]
    with pytest.raises(ConfigError, match="which 3 ranks cannot share"):
        machine(tensor_parallel_size=3)
    for name in ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size"):
        config = EngineConfig(**{name: 2})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{name} = 2 is not simulated on a CPU"):
            SimulatedMachine.of(config, ARCH, "cpu", 141 * GIB, is_server=False)


def test_stages_share_weights_and_pages_and_pass_steps_on() -> None:
    """A request alone gains nothing, nor do decodes, each step of which reads all weights; prompts fill both stages."""

    def stages(pp: int, tp: int = 1) -> SimulatedMachine:
        config = EngineConfig(max_num_seqs=64, pipeline_parallel_size=pp, tensor_parallel_size=tp)
        return SimulatedMachine.of(config, read_arch(FOLDER / "llama-3.1-8b"), "h200", 141 * GIB, is_server=False)

    one, two, four = stages(1), stages(2), stages(2, 2)
    assert 2 * one.n_pages < two.n_pages < 2.3 * one.n_pages and four.n_pages > 4 * one.n_pages
    seconds = {
        n: [one_run(EngineReplica(made), of_lengths(lengths)).outcomes[-1].end_s for made in (one, two)]
        for n, lengths in (("alone", [(64, 200)]), ("many", [(64, 200)] * 64), ("prompts", [(2048, 1)] * 32))
    }  # fmt: skip
    assert seconds["alone"][1] == pytest.approx(seconds["alone"][0], rel=0.05)
    assert seconds["many"][1] == pytest.approx(seconds["many"][0], rel=0.05)
    assert 1.7 < seconds["prompts"][0] / seconds["prompts"][1] < 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2 is not simulated on a CPU"):
        SimulatedMachine.of(EngineConfig(pipeline_parallel_size=2), ARCH, "cpu", 141 * GIB, is_server=False)
    with pytest.raises(ConfigError, match="has 28 layers, and each stage needs one"):
        machine(pipeline_parallel_size=29)


@dataclasses.dataclass(frozen=True)
class RowsCost(FlatCost):
    """A second a row, on the rank that has it."""

    def ranks_s(self, parts: Sequence[tuple[Spans, object]]) -> list[float]:
        return [float(sum(spans.lengths)) for spans, _ in parts]


def test_data_parallel_ranks_go_on_without_one_another() -> None:
    """The first rank has a prompt of 20 rows and the second one of 5, whose decode steps follow at once; but what a
    step made is seen when both have computed their part of it."""
    made = machine(cost=RowsCost(a_row=True), data_parallel_size=2)
    first, second = one_run(EngineReplica(made), [SimRequest(0.0, 20, 2), SimRequest(0.0, 5, 2)]).outcomes
    assert (first.first_s, first.end_s) == (20.0, 21.0) and (second.first_s, second.end_s) == (20.0, 21.0)
    executor = TimedNullExecutor(VirtualClock(), lambda plan: [20.0, 5.0] if not plan.step else [0.0, 3.0], 1, 2)
    for step, end_s in ((0, 20.0), (1, 8.0)):
        executor.submit(StepPlan(step, Spans()))
        assert max(executor._free_s[1]) == (5.0 if not step else end_s)
    assert executor.busy_s == (20 + 5 + 3) / 2


def test_data_parallel_ranks_of_a_dense_model_are_as_fast_as_replicas() -> None:
    requests = [dataclasses.replace(one, arrival_s=0.0) for one in mixed_requests(200)]
    one, two = machine(), machine(data_parallel_size=2)
    assert two.n_pages == one.n_pages and two.kv_slots == 2 * one.kv_slots
    both = Fleet([EngineReplica(one), EngineReplica(one)], RoundRobin(2)).run(requests)
    together = one_run(EngineReplica(two), requests)
    ends = [max(outcome.end_s for outcome in run.outcomes) for run in (both, together)]
    assert all(one.is_done for one in together.outcomes) and ends[1] == pytest.approx(ends[0], rel=0.1)


def test_rows_to_experts_of_other_ranks_are_waited_for() -> None:
    """However they are dealt out, all ranks are as long at a step; it is the planner's where they have equally many."""
    config = EngineConfig(max_model_len=4096, data_parallel_size=4, enable_expert_parallel=True)
    arch = read_arch(FOLDER / "mixtral-8x7b")
    made = SimulatedMachine.of(config, arch, "h200", 141 * GIB, is_server=False)
    n_slots, seconds = made.limits.max_num_seqs, {}
    for name, lengths in (("even", [512] * 4), ("uneven", [1400, 216, 216, 216]), ("alone", [2048, 0, 0, 0])):
        plan = StepPlan(0, Spans())
        for rank, length in enumerate(lengths):
            if length:
                plan.spans.add(rank * n_slots, 0, length, True)
        found = made.ranks_s(plan)
        assert len(found) == 4 and len(set(found)) == 1
        seconds[name] = found[0]
    spans = Spans([0], [0], [512], [0], [True])
    assert seconds["even"] == pytest.approx(made.cost.step_s(spans), rel=1e-3)
    assert seconds["even"] < seconds["uneven"] < seconds["alone"]
    run = one_run(EngineReplica(made), of_lengths([(64, 8)] * 40))
    assert all(one.is_done for one in run.outcomes)
    alone = SimulatedMachine.of(EngineConfig(max_model_len=4096), arch, "h200", 141 * GIB, is_server=False)
    assert made.n_pages > 1.5 * alone.n_pages  # a quarter of the experts' weights


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_ranks_that_share_tokens_begin_sooner_and_decode_no_faster(method: str) -> None:
    arch, values = read_arch(FOLDER / "llama-3.1-8b"), {"max_model_len": 1 << 17, "max_num_batched_tokens": 8192}

    def one_of(**options: object) -> SimulatedMachine:
        config = EngineConfig(**(values | options))  # type: ignore[arg-type]
        return SimulatedMachine.of(config, arch, "h200", 141 * GIB, is_server=False)

    one, four = one_of(), one_of(prefill_context_parallel_size=4, context_parallel_method=method)
    assert 3.8 < four.kv_slots / one.kv_slots < 4.2
    assert four.page_tokens == (64 if method == "ring" else 16)
    a, b = (one_run(EngineReplica(made), of_lengths([(60000, 20)])).outcomes[0] for made in (one, four))
    assert 2 < a.ttft_s / b.ttft_s < 4.2  # products of 2,048 rows are a little faster than of 8,192
    assert a.tpot_s is not None and b.tpot_s is not None and 0.8 * a.tpot_s < b.tpot_s < 1.5 * a.tpot_s
    with pytest.raises(ConfigError, match="divide nothing else yet"):
        one_of(prefill_context_parallel_size=4, tensor_parallel_size=2)


def test_baselines_have_no_ranks_of_their_own() -> None:
    options = SimulateOptions()
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} is 2: leave one of them out"):
            baselines(Variant("as given", options, machine(**{name: 2})))


# ---- requests ---------------------------------------------------------------------------------------------------


def test_lengths_are_those_of_the_benchmarks() -> None:
    real = throughput_dataset("W1", "")(0)
    assert list(nano_vllm_lengths()) == [(len(one.prompt_token_ids), one.output_len) for one in real]
    drawn = sharegpt_lengths(4000, 0)
    inputs, outputs = sorted(a for a, _ in drawn), sorted(b for _, b in drawn)
    assert 75 <= inputs[2000] <= 105 and 112 <= outputs[2000] <= 142 and inputs[0] == 4 and inputs[-1] == 2048


def test_prompts_are_alike_as_long_as_their_parts_are() -> None:
    a, b, c = SimRequest(0, 40, 1, ((3, 20),)), SimRequest(0, 50, 1, ((3, 20),)), SimRequest(0, 15, 1, ((3, 20),))
    first, second, third = a.prompt(0), b.prompt(1), c.prompt(2)
    assert (len(first), len(second), len(third)) == (40, 50, 15)
    assert first[:20] == second[:20] and first[20] != second[20] and third == first[:15]
    assert SimRequest(0, 3, 1, token_ids=[5, 6, 7]).prompt(9) == [5, 6, 7]


def test_a_trace_is_stretched_to_a_rate_and_keeps_its_shape() -> None:
    trace = [SimRequest(at, 1, 1) for at in (5.0, 6.0, 6.0, 9.0)]
    assert [one.arrival_s for one in stretched(trace, 1.5)] == [0.0, 0.5, 0.5, 2.0]
    assert [one.arrival_s for one in SimulateOptions().timed(trace, math.inf, 0)] == [0.0] * 4
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(at_rate(of_lengths([(1, 1)] * 3000), 10, 0.25, 0))]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 == pytest.approx(4.0, rel=0.3)  # burstier


# ---- routers ----------------------------------------------------------------------------------------------------


def test_the_servers_own_choice_is_simulated() -> None:
    """A replica that knows half of the prompt, until it is far ahead of the others; an end frees its place."""
    router = router_named("prefix", 3, 4, 1000, 16)
    assert isinstance(router, ServerRouter)
    system = list(range(400))
    home = router.choose(0, [*system, 1])
    router.tell(0, ended=False)
    assert router.n_open(home) == 1
    router.tell(0, ended=True)
    assert router.n_open(home) == 0
    assert router.choose(1, [*system, 2]) == home and router.choose(2, [7] * 40) != home
    placed = [router.choose(number, [*system, 3]) for number in range(3, 30)]
    assert placed[:6] == [home] * 6 and set(placed) == {0, 1, 2}
    fewest = min(map(router.n_open, range(3)))
    chosen = router.choose(99, [*system[:100], *([9] * 500)])
    assert router.n_open(chosen) == fewest + 1, "a sixth of the prompt counts for nothing"


def test_loads_come_back_to_nothing_and_one_replica_is_the_engine_alone() -> None:
    requests, made = mixed_requests(60), machine(is_server=True)
    router = router_named("least-loaded", 3, 16, made.n_pages, 64)
    assert isinstance(router, LeastLoaded)
    run = Fleet([EngineReplica(made) for _ in range(3)], router).run(requests)
    assert router.loads == [0, 0, 0] and {one.replica for one in run.outcomes} == {0, 1, 2}
    alone = Fleet([EngineReplica(made)], router_named("prefix", 1, 16, made.n_pages, 64)).run(requests)
    assert [one.end_s for one in alone.outcomes] == [
        one.end_s for one in one_run(EngineReplica(made), requests).outcomes
    ]


def test_replicas_with_a_prefix_each_find_more_behind_the_prefix_router() -> None:
    made = machine(is_server=True)
    requests = at_rate(of_lengths([(8, 8)] * 160, prefix_len=512, n_prefixes=20), 400.0, 1.0, 0)

    def hits(name: str) -> float:
        router = router_named(name, 8, 16, made.n_pages, made.limits.max_num_seqs)
        return float(
            figures(Fleet([EngineReplica(made) for _ in range(8)], router).run(requests))["prefix_hit_rate"] or 0
        )

    assert hits("prefix") > 0.8 > hits("random") + 0.1


class Believing(ServerRouter):
    """Counts what it believes of replicas, and may be deaf to what they say."""

    expected = 0

    def choose(self, number: int, prompt: Sequence[int]) -> int:
        chosen = super().choose(number, prompt)
        self.expected += 16 * (self._chooser._requests[str(number)].n_expected or 0)
        return chosen


def test_replicas_that_say_what_they_evicted_are_not_expected_to_have_it() -> None:
    """Pools are small beside outputs, so prefixes go sooner than by what was sent."""
    made = dataclasses.replace(machine(is_server=True), n_pages=300)
    rng = random.Random(3)
    lengths = [(rng.randint(20, 100), rng.randint(8, 400)) for _ in range(250)]
    requests = of_lengths(lengths, prefix_len=256, n_prefixes=12)
    rng.shuffle(requests)
    found = {}
    for follows in (True, False):
        router = Believing(2, 16, made.n_pages, made.limits.max_num_seqs)
        router.follows = follows
        run = Fleet([EngineReplica(made) for _ in range(2)], router).run(at_rate(requests, 40.0, 1.0, 0))
        n_found = sum(one.n_cached for one in run.outcomes)
        found[follows] = (n_found, router.expected - n_found)
    assert found[True][0] > found[False][0], "more is found"
    assert found[True][1] < found[False][1] / 3, "and less is missed"


def test_the_router_hears_of_an_end_when_it_happens_and_not_before() -> None:
    """Steps take 1 s: at 0.5 both replicas are busy, at 2.5 the first is free again."""
    made = machine(cost=FlatCost())
    router = LeastLoaded(2)
    requests = [SimRequest(0.0, 50, 1), SimRequest(0.1, 20, 9), SimRequest(0.5, 5, 1), SimRequest(2.6, 5, 1)]
    run = Fleet([EngineReplica(made) for _ in range(2)], router).run(requests)
    assert [one.replica for one in run.outcomes] == [0, 1, 1, 0]


# ---- baselines --------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[SimulatedMachine], Policy]] = {
    "static": lambda made: StaticBatching(made, 4),
    "dynamic": lambda made: DynamicBatching(made, [2, 4], 3.0),
    "reserved": Reserved,
    "paged": PagedWhole,
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_baseline_answers_everything_in_order_of_time(name: str) -> None:
    requests = [*mixed_requests(50), SimRequest(2.0, 5000, 1)]
    run = one_run(MAKERS[name](machine()), requests)
    *taken, refused = run.outcomes
    assert refused.refusal == "context_length_exceeded"
    assert all(one.is_done and one.arrival_s < one.first_s <= one.end_s for one in taken)
    assert 0.0 <= float(figures(run)["kv_waste"] or 0.0) < 1.0
    n_decoded = sum(one.output_len - 1 for one in taken)
    assert sum(run.logs[0].n_gaps) == n_decoded, "a gap for every token behind a first one"


def test_a_static_batch_waits_to_be_full_and_runs_to_its_longest() -> None:
    requests = [SimRequest(float(at), 10, n) for at, n in enumerate((1, 5, 2, 1, 1))]
    run = one_run(StaticBatching(machine(cost=FlatCost()), 2), requests)
    firsts = [one.first_s for one in run.outcomes]
    assert firsts == [2.0, 2.0, 7.0, 7.0, 9.0]  # full at 1; five steps to 6; two to 8; what is left
    assert run.outcomes[1].end_s == 6.0
    assert run.logs[0].n_computed == 2 * 10 + 2 * 4 + 2 * 10 + 2 + 10  # padding counts


def test_a_dynamic_batch_leaves_at_a_preferred_size_or_after_the_delay() -> None:
    requests = [SimRequest(at, 10, 1) for at in (0.0, 10.0, 10.5, 10.6, 20.0)]
    run = one_run(DynamicBatching(machine(cost=FlatCost()), [2, 4], 3.0), requests)
    assert [one.first_s for one in run.outcomes] == [4.0, 11.5, 11.5, 14.6, 24.0]


def test_orca_reserves_the_longest_and_paging_does_not() -> None:
    made = machine(cost=FlatCost(), num_gpu_blocks_override=65 * 3, max_model_len=1024)
    requests = of_lengths([(20, 20)] * 12)
    reserved, paged = one_run(Reserved(made), requests), one_run(PagedWhole(made), requests)
    assert max(reserved.logs[0].timeline.n_running) == 3 and max(paged.logs[0].timeline.n_running) == 12
    assert float(figures(reserved)["kv_waste"] or 0) > 0.9 > 0.5 > float(figures(paged)["kv_waste"] or 1)


def test_whole_prompts_stall_decodes_and_chunks_do_not() -> None:
    """A row a second. Six decode; a prompt of 200 comes: alone in its step, before one of seven rows, or
    beside them in chunks of 16 tokens."""
    requests = [*of_lengths([(2, 100)] * 6), SimRequest(100.0, 200, 2)]
    paged = one_run(PagedWhole(machine(cost=FlatCost(a_row=True))), requests)
    chunked = one_run(EngineReplica(machine(cost=FlatCost(a_row=True), max_num_batched_tokens=16)), requests)
    longest = [gap_percentiles(run.logs, (100.0,))[100.0] for run in (paged, chunked)]
    assert longest == [207.0, 16.0]


def test_gaps_of_stages_are_those_of_a_sequence() -> None:
    """Two stages have other sequences in every other step: a token of one waits for two of them."""
    requests = of_lengths([(2, 50)] * 4)
    for options in ({}, {"pipeline_parallel_size": 2}):
        run = one_run(EngineReplica(machine(cost=FlatCost(), **options)), requests)
        (log,) = run.logs
        n_gaps, total_s = sum(log.n_gaps), sum(gap * n for gap, n in zip(log.gaps_s, log.n_gaps, strict=True))
        assert n_gaps == 4 * 49
        assert total_s == pytest.approx(sum(one.end_s - one.first_s for one in run.outcomes))


def test_paging_preempts_the_last_and_loses_no_token() -> None:
    made = machine(cost=FlatCost(), num_gpu_blocks_override=12, max_model_len=160)
    run = one_run(PagedWhole(made), of_lengths([(30, 60)] * 4))
    assert run.logs[0].preemptions > 0 and all(one.is_done for one in run.outcomes)


# ---- figures ----------------------------------------------------------------------------------------------------


def test_figures_of_two_requests_by_hand() -> None:
    log = StepLog(kv_slots=100)
    log.gaps_s.extend([0.1, 0.5])
    log.n_gaps.extend([9, 1])
    log.sample(1.0, 2.0, 30, 40, 5)
    log.sample(2.0, 1.0, 0, 20, 5)
    outcomes = [Outcome(0, 1.0, 10, 5, 1.5, 3.5), Outcome(1, 2.0, 10, 1, 2.2, 2.2)]
    found = figures(Run(outcomes, [log]), Slo(ttft_s=0.4))
    assert found["duration_s"] == 2.5 and found["output_throughput"] == pytest.approx(6 / 2.5)
    assert found["p50_tpot_ms"] == 500.0 and found["p50_ttft_ms"] == pytest.approx(350.0)
    assert found["goodput"] == pytest.approx(1 / 2.5) and found["slo_attainment"] == 0.5
    assert (found["p50_itl_ms"], found["p99_itl_ms"], found["max_itl_ms"]) == (100.0, 500.0, 500.0)
    assert found["kv_waste"] == pytest.approx(1 - 60 / 100) and found["mean_kv_use"] == pytest.approx(100 / 300)


@pytest.mark.parametrize(("text", "message"), [
    ("ttft=200", "with us, ms or s"), ("ttft=200min", "with us, ms or s"), ("tpot=-1ms", "with us, ms or s"),
    ("ttft=nanms", "with us, ms or s"), ("ttft=0ms", "nothing takes no time"), ("tpot=1ms,tpot=2ms", "says tpot twice"),
    ("tttf=2ms", "'tttf' is no time that is known; did you mean ttft"), ("foo=2ms", "there are ttft, tpot, e2e"),
])  # fmt: skip
def test_a_bad_slo_is_refused_by_its_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


def test_an_slo_has_the_units_of_quire_plan() -> None:
    assert parse_slo("ttft=500us, tpot=20ms,e2e=5s") == Slo(ttft_s=500e-6, tpot_s=0.02, e2e_s=5.0)
    assert parse_slo("none") is None and parse_slo("") is None


def test_capacity_is_where_the_limit_stops_being_kept() -> None:
    """A step of a second and at most 16 sequences of 4 tokens: four requests a second pass, and no more."""
    made = machine(cost=FlatCost())
    variant = Variant("it", SimulateOptions(), made)
    requests = of_lengths([(8, 4)] * 400)
    found = capacity(variant, requests, Slo(ttft_s=8.0), 0.99)
    assert 2.5 < float(found["capacity"] or 0) < 4.6 and found["is_bound"] == 0
    easy = capacity(variant, requests, Slo(ttft_s=1e6), 0.99)
    assert easy["is_bound"] == 1
