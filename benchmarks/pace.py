"""Policies for prompts beside decodes, simulated: the real scheduler on the null device and an H200's virtual clock.

    python -m benchmarks.pace --lengths w3_lengths.json [--factors 0 1.5 2] [--budgets 8192 512] [--weights 0 8]

For each policy: W2 and W3 all at once, W3 at shares of that rate (Poisson), and gaps between tokens of 64 streams
beside a prompt of 16k tokens, these also for other speeds of arithmetic than the estimate behind the factor takes.
A factor is `Pace.factor` (0: none), a budget is `max_num_batched_tokens`. For each weight of who waits, at the factor
of a server: W2 at once again, and rates of `quire simulate --capacity` (chats, 8B shape) at some limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence

import msgspec

from quire.bench.datasets import BenchRequest, from_lengths, nano_vllm, read_lengths
from quire.bench.loadgen import arrival_offsets_s
from quire.bench.report import build_report, write_report
from quire.bench.shape import FOLDER
from quire.bench.simulate.figures import Slo
from quire.bench.simulate.options import SimulateOptions
from quire.bench.simulate.session import Variant, capacity
from quire.bench.summary import percentile
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import DEFAULT_STALL_FACTOR
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.plan import Spans
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.executors.null import NullExecutor
from quire.engine.simulated import SimulatedMachine
from quire.planner.accelerators import accelerator_named
from quire.planner.calibration import Ceilings, calibration_of
from quire.planner.pace import WAITING_WEIGHT, pace_for
from quire.planner.shape import head_weights, kv_numbers_per_token, layer_weights

RESULTS = pathlib.Path(__file__).with_name("results")
PAGE_SIZE, N_PAGES = 16, 1 << 16
N_SEQS, MODEL_LEN = 512, 20480
N_STREAMS, STREAM_LEN, PROMPT_LEN = 64, 1024, 16384
WARM_STEPS = 20
LIMITS_S = ((0.2, 0.01), (0.5, 0.02), (1.0, 0.01), (0.3, 0.012))
"""Of first tokens, and of the others."""


@dataclasses.dataclass(frozen=True)
class SerialCost:
    """Steps as kernels run: products, attention of decodes and attention of prompts one after the other.

    bandwidth and arithmetic: shares of the ceilings that each reaches; overhead_s: launches and gaps of a step.
    """

    arch: ModelArch
    ceilings: Ceilings
    bandwidth: float = 0.85
    arithmetic: float = 0.75
    overhead_s: float = 300e-6

    def step_s(self, spans: Spans) -> float:
        """Seconds of one step with these spans."""
        arch = self.arch
        bytes_per_s = self.bandwidth * self.ceilings.read_bytes_per_s
        flops_per_s = self.arithmetic * self.ceilings.rate("bfloat16")
        body, head = arch.n_layers * layer_weights(arch), head_weights(arch)
        n_tokens, n_wants = sum(spans.lengths), sum(spans.wants)
        products_s = max(2 * body / bytes_per_s, 2 * body * n_tokens / flops_per_s)
        head_s = max(2 * head / bytes_per_s, 2 * head * n_wants / flops_per_s) if n_wants else 0.0
        n_decoded = n_pairs = 0.0
        for start, length in zip(spans.starts, spans.lengths, strict=True):
            if length == 1:
                n_decoded += start + 1
            else:
                n_pairs += length * (start + (length + 1) / 2)
        attention_s = n_decoded * 2 * kv_numbers_per_token(arch) / bytes_per_s
        prefill_s = 4 * arch.n_layers * arch.n_heads * arch.head_dim * n_pairs / flops_per_s
        return self.overhead_s + products_s + head_s + attention_s + prefill_s


class Simulation:
    """One scheduler and the token times of its requests, on a clock that its steps move."""

    def __init__(
        self, factor: float, budget: int, arithmetic: float = SerialCost.arithmetic, weight: float = WAITING_WEIGHT
    ) -> None:
        arch, ceilings = read_arch(FOLDER / "llama-3.1-8b"), calibration_of("h200")
        assert ceilings is not None
        self.clock = VirtualClock()
        pace = dataclasses.replace(pace_for(arch, ceilings, factor), waiting_weight=weight) if factor else None
        config = SchedulerConfig(
            n_pages=N_PAGES, page_size=PAGE_SIZE, max_num_seqs=N_SEQS, max_num_batched_tokens=budget,
            max_model_len=MODEL_LEN, pipeline_depth=1, pace=pace,
        )  # fmt: skip
        self.scheduler = Scheduler(config, self.clock)
        self.executor = NullExecutor(
            n_pages=N_PAGES, page_size=PAGE_SIZE, max_num_seqs=N_SEQS, max_model_len=MODEL_LEN,
            vocab_size=arch.vocab_size, clock=self.clock, cost=SerialCost(arch, ceilings, arithmetic=arithmetic),  # type: ignore[arg-type]
        )  # fmt: skip
        self.times_s: dict[str, list[float]] = {}
        self.n_prompt_steps = 0

    def submit(self, name: str, request: BenchRequest) -> None:
        """Queue a request under a name."""
        params = SamplingParams(max_tokens=request.output_len, ignore_eos=True)
        self.times_s[name] = []
        self.scheduler.submit(
            Request(
                request_id=name,
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                max_tokens=request.output_len,
                seed=0,
            )
        )

    def step(self) -> None:
        """One step; its tokens come when it ends."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.n_prompt_steps += plan.n_tokens > len(plan.spans)
        for delta in self.scheduler.commit(self.executor.execute(plan)):
            self.times_s[delta.request_id] += [self.clock.now_s()] * len(delta.token_ids)

    def run(self, requests: Sequence[BenchRequest], offsets_s: Sequence[float]) -> dict[str, float]:
        """All requests at their times; latencies in ms."""
        n = 0
        while n < len(requests) or self.scheduler.has_work():
            while n < len(requests) and offsets_s[n] <= self.clock.now_s():
                self.submit(str(n), requests[n])
                n += 1
            if self.scheduler.has_work():
                self.step()
            else:
                self.clock.advance(offsets_s[n] - self.clock.now_s())
        times = [self.times_s[str(i)] for i in range(n)]
        ttft = [1000 * (one[0] - offset_s) for one, offset_s in zip(times, offsets_s, strict=True)]
        tpot = [1000 * (one[-1] - one[0]) / (len(one) - 1) for one in times if len(one) > 1]
        itl = [1000 * (b - a) for one in times for a, b in itertools.pairwise(one)]
        figures = {"requests_per_s": n / self.clock.now_s(), "longest_itl_ms": max(itl)}
        for name, values in (("ttft_ms", ttft), ("tpot_ms", tpot), ("itl_ms", itl)):
            figures |= {f"p{share}_{name}": percentile(values, share) for share in (50, 99)}
        return figures

    def stall(self) -> dict[str, float]:
        """Streams decode, a long prompt comes: its first token, and the gaps meanwhile against those before."""
        for i, request in enumerate(from_lengths([(STREAM_LEN, 2048)] * N_STREAMS, 10_000, 1)(0)):
            self.submit(f"stream {i}", request)
        while min(map(len, self.times_s.values())) < WARM_STEPS:
            self.step()
        settled_s = self.clock.now_s()
        while min(map(len, self.times_s.values())) < 2 * WARM_STEPS:
            self.step()
        self.submit("prompt", from_lengths([(PROMPT_LEN, 1)], 10_000, 2)(0)[0])
        begin_s = self.clock.now_s()
        while not self.times_s["prompt"]:
            self.step()
        streams = [times_s for name, times_s in self.times_s.items() if name != "prompt"]
        pairs = [pair for times_s in streams for pair in itertools.pairwise(times_s)]
        median_ms = percentile([1000 * (b - a) for a, b in pairs if a >= settled_s and b <= begin_s], 50)
        gaps_ms = [1000 * (b - a) for a, b in pairs if b > begin_s]
        return {
            "median_step_ms": median_ms,
            "p99_gap_ms": percentile(gaps_ms, 99),
            "ratio": percentile(gaps_ms, 99) / median_ms,
            "prompt_ttft_ms": 1000 * (self.times_s["prompt"][0] - begin_s),
        }


def kept_rate(weight: float, ttft_s: float, tpot_s: float) -> float:
    """Requests a second at which 99 % of chats keep both limits."""
    config = EngineConfig(model=str(FOLDER / "llama-3.1-8b"))
    options = SimulateOptions(workload="sharegpt", num_prompts=600)
    memory_bytes = int(accelerator_named("h200").memory_bytes)
    machine = SimulatedMachine.of(config, read_arch(FOLDER / "llama-3.1-8b"), "h200", memory_bytes, is_server=True)
    assert machine.pace is not None
    machine = dataclasses.replace(machine, pace=dataclasses.replace(machine.pace, waiting_weight=weight))
    requests, _ = options.requests(config.seed)
    return float(capacity(Variant("", options, machine), requests, Slo(ttft_s, tpot_s), 0.99)["capacity"] or 0)


def policies(args: argparse.Namespace) -> list[tuple[float, int]]:
    """(factor, budget): each factor with the first budget, and the other budgets without a factor."""
    first, *others = args.budgets
    return [(factor, first) for factor in args.factors] + [(0.0, budget) for budget in others]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pace", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.0, 1.5, 1.75, 2.0, 2.5])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 2048, 512])
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.9], help="shares of the first policy's rate")
    parser.add_argument("--arithmetic", type=float, nargs="*", default=[0.45, 0.55, 0.65, 0.75, 0.85])
    parser.add_argument("--weights", type=float, nargs="*", default=[0.0, 1.0, 2.0, 4.0, 8.0], help="see Pace")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--output", default=str(RESULTS / "pace.json"))
    args = parser.parse_args(argv)
    sensitivity: list[dict[str, object]] = []
    for factor, share in itertools.product(filter(None, args.factors), args.arithmetic):
        figures = Simulation(factor, args.budgets[0], share).stall()
        sensitivity.append({"factor": factor, "arithmetic": share, **figures})
        print(msgspec.json.encode(sensitivity[-1]).decode(), flush=True)
    lengths = read_lengths(args.lengths, args.requests)
    w2 = nano_vllm(0)
    rows: list[dict[str, object]] = []
    full_rate = 0.0
    for factor, budget in policies(args):
        row: dict[str, object] = {"factor": factor, "budget": budget, "stall": Simulation(factor, budget).stall()}
        at_once = Simulation(factor, budget).run(from_lengths(lengths, 10_000, 3)(0), [0.0] * len(lengths))
        row["at_once"] = at_once
        row["w2_at_once"] = Simulation(factor, budget).run(w2, [0.0] * len(w2))
        full_rate = full_rate or at_once["requests_per_s"]
        for load in args.loads:
            offsets_s = arrival_offsets_s(len(lengths), load * full_rate, 1.0, 0)
            row[f"load {load:g}"] = Simulation(factor, budget).run(from_lengths(lengths, 10_000, 4)(0), offsets_s)
        rows.append(row)
        print(msgspec.json.encode(row).decode(), flush=True)
    weights: list[dict[str, object]] = []
    for weight in args.weights:
        rates = {f"{ttft_s:g} s, {tpot_s:g} s": kept_rate(weight, ttft_s, tpot_s) for ttft_s, tpot_s in LIMITS_S}
        found = Simulation(DEFAULT_STALL_FACTOR["cuda"], args.budgets[0], weight=weight).run(w2, [0.0] * len(w2))
        weights.append({"weight": weight, "w2_at_once": found, "kept_rates": rates})
        print(msgspec.json.encode(weights[-1]).decode(), flush=True)
    results = {"policies": rows, "sensitivity": sensitivity, "weights": weights}
    write_report(args.output, build_report("pace", vars(args), results, argv=["benchmarks.pace", *argv]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
