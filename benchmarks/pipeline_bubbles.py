"""How long stages of a pipeline stand idle, by stages and micro-batches: measured, simulated, and by the formula.

    python -m benchmarks.pipeline_bubbles --stages 2                     # two processes, gloo
    python -m benchmarks.pipeline_bubbles --device cuda --stages 2,4 --model shape:llama-3.1-8b --chunk 4096

A batch of M prompts, each as long as a step may be, is M micro-batches: nobody waits for tokens. By the formula a stage
is idle for (S - 1) / (M + S - 1) of the time (Huang et al. 2019, "GPipe", section 2.3). On a CPU the share is read from
the clocks of the stages' threads (`stage_idle`). On GPUs it follows from times: one GPU, which never waits, has the
same batch in T(M), of which a stage does 1 / S; of its W(M) it is idle for 1 - T(M) / (S W(M)). (Not from one
micro-batch alone: GPUs that rest meanwhile are 7 % faster.) At steady load S sequences decode, a token each in a step
of its own, and no stage should be idle. Some rounds, in each of which every M has its turn: shares are medians, seconds
the least.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from benchmarks.rank_engines import (
    SMALL_LLAMA,
    Row,
    engine,
    model_folder,
    numbers,
    options_of,
    prompts_of,
    recording,
    say,
    took_s,
)
from benchmarks.stage_idle import StageIdle
from quire import LLM
from quire.bench.simulate.fleet import Fleet
from quire.bench.simulate.replica import EngineReplica
from quire.bench.simulate.requests import of_lengths
from quire.bench.simulate.router import RoundRobin
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.core.errors import EngineError
from quire.engine.simulated import SimulatedMachine
from quire.engine.step_record import StepRecord
from quire.planner.accelerators import accelerator_named

MODEL = {**SMALL_LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
SIMULATED, SIMULATED_GPU, SIMULATED_CHUNK = "shape:llama-3.1-8b", "h200", 4096
N_TOKENS = 48
"""Of a sequence that decodes."""
COLUMNS = {
    "load": "load", "stages": "stages", "micro_batches": "micro-batches", "seconds": "seconds", "idle": "idle",
    "each": "each", "simulated": "simulated", "formula": "formula",
}  # fmt: skip


def formula(n_stages: int, n_micro: int) -> float:
    """Share of the time in which a stage is idle."""
    return (n_stages - 1) / (n_micro + n_stages - 1)


def idle(n_stages: int, alone_s: float, seconds: float) -> float:
    """See the module. alone_s: of the same work without stages."""
    return 1 - alone_s / (n_stages * seconds)


class Measured:
    """One engine's runs, by what was run."""

    def __init__(self, n_stages: int) -> None:
        self.n_stages = n_stages
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.idle: dict[str, list[list[float]]] = defaultdict(list)
        """Of each stage, by rounds; empty: not known by clocks."""

    def run(self, name: str, work: Callable[[], float]) -> None:
        """work: returns its seconds."""
        with StageIdle(self.n_stages) as stages:
            self.seconds[name].append(work())
        self.idle[name].append(stages.shares)

    def least_s(self, name: str) -> float:
        """Of the rounds."""
        return min(self.seconds[name])

    def shares(self, name: str) -> list[float]:
        """Of each stage that it was idle."""
        return [statistics.median(of_stage) for of_stage in zip(*self.idle[name], strict=True)]


def batch_s(llm: LLM, n_micro: int, chunk: int) -> float:
    """EngineError where a step had another number of prompts than one."""
    records: list[StepRecord] = []
    llm.on_step = records.append
    try:
        seconds = took_s(llm, prompts_of(n_micro, chunk), 1)
    finally:
        llm.on_step = None
    if len(records) != n_micro:
        raise EngineError(f"{n_micro} prompts of {chunk} tokens took {len(records)} steps: these are no micro-batches")
    return seconds


def measured(folder: str, n_stages: int, options: argparse.Namespace) -> Measured:
    """Batches are named after their number of micro-batches, sequences that decode after theirs."""
    micro, found = numbers(options.micro_batches), Measured(n_stages)
    llm = engine(
        folder, options.device, pipeline_parallel_size=n_stages, max_num_batched_tokens=options.chunk,
        max_num_seqs=max(*micro, 2 * n_stages), max_model_len=options.chunk + N_TOKENS,
        pp_layer_partition=options.partition if n_stages > 1 else "",
    )  # fmt: skip
    batch_s(llm, n_stages, options.chunk)
    for _ in range(options.rounds):
        for n in sorted({1, *micro}):
            found.run(f"batch {n}", lambda n=n: batch_s(llm, n, options.chunk))  # type: ignore[misc]
        for n in (1, n_stages):
            found.run(f"decode {n}", lambda n=n: took_s(llm, prompts_of(n, 16), N_TOKENS))  # type: ignore[misc]
    llm.shutdown()
    return found


def simulated(n_stages: int, micro: list[int]) -> Measured:
    """The same of the real scheduler on a virtual clock, with the planner's times of an H200."""
    with model_folder(SIMULATED) as folder:
        config = EngineConfig(
            model=folder, pipeline_parallel_size=n_stages, max_num_batched_tokens=SIMULATED_CHUNK,
            max_model_len=SIMULATED_CHUNK + N_TOKENS, enable_prefix_caching=False,
        )  # fmt: skip
        arch = read_arch(pathlib.Path(folder))
    memory_bytes = int(accelerator_named(SIMULATED_GPU).memory_bytes)
    machine = SimulatedMachine.of(config, arch, SIMULATED_GPU, memory_bytes, is_server=False)

    def seconds(n: int, n_in: int, n_out: int) -> float:
        run = Fleet([EngineReplica(machine)], RoundRobin(1)).run(of_lengths([(n_in, n_out)] * n))
        return max(one.end_s or 0.0 for one in run.outcomes)

    found = Measured(n_stages)
    for n in sorted({1, *micro}):
        found.seconds[f"batch {n}"].append(seconds(n, SIMULATED_CHUNK, 1))
    for n in (1, n_stages):
        found.seconds[f"decode {n}"].append(seconds(n, 1, N_TOKENS))
    return found


def whole_s(whole: Measured, load: str, n: int) -> float:
    """Of the same work without stages."""
    return whole.least_s(f"batch {n}") if load == "batch" else n * whole.least_s("decode 1")


def idle_of(found: Measured | None, whole: Measured | None, load: str, n: int) -> float | None:
    """By clocks where they are known, else by times. whole: without stages; None: not measured. n sequences that decode
    are as many steps of one."""
    if found is None:
        return None
    shares = found.shares(f"{load} {n}")
    if shares:
        return sum(shares) / len(shares)
    if whole is None:
        return None
    return idle(found.n_stages, whole_s(whole, load, n), found.least_s(f"{load} {n}"))


def rows_of(
    n_stages: int, micro: list[int], real: Measured | None, whole: Measured | None, virtual: Sequence[Measured]
) -> list[Row]:
    """real, and whole, without stages: None: not measured. virtual: simulated, with stages and without."""
    cases = [("batch", n, formula(n_stages, n)) for n in micro]
    cases += [("decode", n, 1 - n / n_stages) for n in (1, n_stages)]
    rows: list[Row] = []
    for load, n, said in cases:
        name, row = f"{load} {n}", {"load": load, "stages": n_stages, "micro_batches": n, "formula": said}
        row |= {"idle": idle_of(real, whole, load, n), "simulated": idle_of(*virtual, load, n)}
        if real is not None:
            row |= {"seconds": real.least_s(name), "idle_stages": real.shares(name) or None}
            row["whole_s"] = None if whole is None else whole_s(whole, load, n)
            row["each"] = " ".join(f"{share:.2f}" for share in real.shares(name)) or None
        rows.append(row)
    return rows


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--stages", default="2", help="such as 2,4")
    parser.add_argument("--simulated-stages", default="2,4,8", help="without devices, beside those that are measured")
    parser.add_argument("--micro-batches", default="1,2,4,8,16,32")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="", help="default: a random one of 8 layers")
    parser.add_argument("--partition", default="", help="layers of each stage that is measured, such as 17,15")
    options = parser.parse_args()
    micro, stages = numbers(options.micro_batches), numbers(options.stages)
    virtual = f"{SIMULATED} on {SIMULATED_GPU}, {SIMULATED_CHUNK} tokens"
    with (
        model_folder(options.model or MODEL) as folder,
        recording("pipeline_bubbles", options, virtual=virtual) as rows,
    ):
        by_times = options.device == "cuda"  # hosts that launch are no stages
        whole, simulated_whole = measured(folder, 1, options) if by_times else None, simulated(1, micro)
        for n_stages in sorted({*stages, *numbers(options.simulated_stages)}):
            real = measured(folder, n_stages, options) if n_stages in stages else None
            if real is not None and by_times:
                real.idle.clear()
            found = rows_of(n_stages, micro, real, whole, (simulated(n_stages, micro), simulated_whole))
            say(found, COLUMNS)
            rows += found


if __name__ == "__main__":
    main()
