"""How long stages of a pipeline stand idle, by stages and micro-batches: measured, simulated, and by the formula.

    python -m benchmarks.pipeline_bubbles --stages 2                     # two processes, gloo
    python -m benchmarks.pipeline_bubbles --device cuda --stages 2,4 --model shape:llama-3.1-8b --chunk 4096

A batch of M prompts, each as long as a step may be, is M micro-batches: nobody waits for tokens. One alone goes through
all S stages, one of which works at a time, so a stage has it for W(1) / S. Of W(M) the share that a stage is idle is
1 - M W(1) / (S W(M)); by the formula (S - 1) / (M + S - 1) (Huang et al. 2019, "GPipe", section 2.3). At steady load S
sequences decode, a token each in a step of its own: against one sequence alone, the share would be 0 without bubbles.
Seconds are the least of some rounds, in each of which every M has its turn.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from benchmarks.rank_engines import (
    SMALL_LLAMA,
    Row,
    check,
    engine,
    model_folder,
    numbers,
    options_of,
    prompts_of,
    record,
    say,
    took_s,
)
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
    "simulated": "simulated", "formula": "formula",
}  # fmt: skip


def formula(n_stages: int, n_micro: int) -> float:
    """Share of the time in which a stage is idle."""
    return (n_stages - 1) / (n_micro + n_stages - 1)


def idle(n_stages: int, n_micro: int, alone_s: float, seconds: float) -> float:
    """See the module. alone_s: of one micro-batch."""
    return 1 - n_micro * alone_s / (n_stages * seconds)


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


def decode_s(llm: LLM, n_seqs: int) -> float:
    """A token of each, without the prompts."""
    prompts = prompts_of(n_seqs, 16)
    return (took_s(llm, prompts, N_TOKENS) - took_s(llm, prompts, 2)) / (N_TOKENS - 2)


def measured(folder: str, n_stages: int, options: argparse.Namespace) -> tuple[dict[int, float], dict[int, float]]:
    """Least seconds by micro-batches, and of a token by sequences that decode."""
    micro, found, decodes = numbers(options.micro_batches), dict[int, float](), dict[int, float]()
    llm = engine(
        folder, options.device, pipeline_parallel_size=n_stages, max_num_batched_tokens=options.chunk,
        max_num_seqs=max(*micro, 2 * n_stages), max_model_len=options.chunk + N_TOKENS,
    )  # fmt: skip
    batch_s(llm, n_stages, options.chunk)
    for _ in range(options.rounds):
        for n in sorted({1, *micro}):
            found[n] = min(found.get(n, float("inf")), batch_s(llm, n, options.chunk))
        for n in (1, n_stages):
            decodes[n] = min(decodes.get(n, float("inf")), decode_s(llm, n))
    llm.shutdown()
    return found, decodes


def simulated(n_stages: int, micro: list[int]) -> tuple[dict[int, float], dict[int, float]]:
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

    def token_s(n: int) -> float:
        return (seconds(n, 16, N_TOKENS) - seconds(n, 16, 2)) / (N_TOKENS - 2)

    return {n: seconds(n, SIMULATED_CHUNK, 1) for n in {1, *micro}}, {n: token_s(n) for n in (1, n_stages)}


def rows_of(n_stages: int, micro: list[int], real: Any, virtual: Any) -> list[Row]:
    """real, virtual: seconds by micro-batches, and of a token by sequences; real may be None."""
    rows: list[Row] = []
    for n in micro:
        row: Row = {"load": "one batch", "stages": n_stages, "micro_batches": n, "formula": formula(n_stages, n)}
        for name, found in (("idle", real), ("simulated", virtual)):
            row[name] = None if found is None else idle(n_stages, n, found[0][1], found[0][n])
        rows.append({**row, "seconds": None if real is None else real[0][n]})
    steady: Row = {"load": "decode, steady", "stages": n_stages, "micro_batches": n_stages, "formula": 0.0}
    for name, found in (("idle", real), ("simulated", virtual)):
        steady[name] = None if found is None else 1 - found[1][1] / found[1][n_stages]
    return [*rows, {**steady, "seconds": None if real is None else real[1][n_stages]}]


def main() -> None:
    parser = options_of(__doc__, "benchmarks/results/pipeline_bubbles_cpu.json")
    parser.add_argument("--stages", default="2", help="such as 2,4")
    parser.add_argument("--simulated-stages", default="2,4,8", help="without devices, beside those that are measured")
    parser.add_argument("--micro-batches", default="1,2,4,8,16,32")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="", help="default: a random one of 8 layers")
    options = parser.parse_args()
    check(options)
    micro, stages, rows = numbers(options.micro_batches), numbers(options.stages), list[Row]()
    with model_folder(options.model or MODEL) as folder:
        for n_stages in sorted({*stages, *numbers(options.simulated_stages)}):
            real = measured(folder, n_stages, options) if n_stages in stages else None
            found = rows_of(n_stages, micro, real, simulated(n_stages, micro))
            say(found, COLUMNS)
            rows += found
    record("pipeline_bubbles", options, rows, simulated=f"{SIMULATED} on {SIMULATED_GPU}, {SIMULATED_CHUNK} tokens")


if __name__ == "__main__":
    main()
