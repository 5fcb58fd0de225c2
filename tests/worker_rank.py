"""A small worker and plans for it. As a program: one of several ranks, given RANK SIZE MEETING_POINT FOLDER."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import msgspec
import torch

from quire.compute.dist.comm import Comm, Reduction
from quire.compute.dist.data_parallel import DataParallel
from quire.compute.dist.gloo import GlooComm
from quire.compute.dist.pipeline import Pipeline
from quire.compute.draft.drafter import Drafter
from quire.compute.platform import Platform, platform_of
from quire.compute.worker import Allocation, Worker
from quire.config.engine import EngineConfig
from quire.config.mesh import placed
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.plan import PageAppend, SlotOpen, SlotParams, Spans, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import StepResult

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
PARAMS = SlotParams(0.8, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 7, 2, -1, {}, None, [], [], 0)
MASK = (0).to_bytes(12, "little") + (0b1010).to_bytes(4, "little")
"""Of 128 tokens: 97 and 99 may be chosen."""


def make_worker(
    folder: pathlib.Path,
    comm: Comm | None = None,
    drafter: Drafter | None = None,
    platform: Platform | None = None,
    pipeline: Pipeline | None = None,
    data: DataParallel | None = None,
    **options: Any,
) -> Worker:
    """Random weights of a fixed seed, one thread; platform: None for the CPU."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        device="cpu", num_threads=1, load_format="dummy", block_size=8, max_num_seqs=4, max_num_batched_tokens=64,
        **options,
    )  # fmt: skip
    arch = placed(read_arch(folder), config, 0 if data is None else data.dp_rank)
    platform = platform_of(config) if platform is None else platform
    return Worker(
        config, resolve(config, arch, platform.name), folder, arch, platform, comm, drafter, pipeline=pipeline,
        data=data,
    )  # fmt: skip


def spans(*rows: tuple[int, int, int, bool]) -> dict[str, Any]:
    """(slot, start, length, wants a token)."""
    made = Spans()
    for row in rows:
        made.add(*row)
    return {"spans": made, "n_tokens": sum(row[2] for row in rows)}


def plans() -> list[StepPlan]:
    """Prompts in chunks beside a decode, logprobs of a prompt, a vector, a mask, a sequence that ends."""
    prompt = [(7 * i) % 190 for i in range(40)]
    asks = msgspec.structs.replace(PARAMS, prompt_logprobs=1, logprobs=-1)
    pools = msgspec.structs.replace(PARAMS, pooling=Pooling.LAST)
    opened = [SlotOpen(0, prompt, 40, PARAMS), SlotOpen(1, prompt[:5], 5, asks)]
    pages = [PageAppend(0, 0, [1, 2, 3, 4, 5, 6]), PageAppend(1, 0, [7, 8])]
    return [
        StepPlan(0, **spans((0, 0, 30, False), (1, 0, 5, True)), opened=opened, pages=pages),
        StepPlan(1, **spans((0, 30, 10, True), (1, 5, 1, True))),
        StepPlan(
            2, **spans((0, 40, 1, True), (1, 6, 1, True), (2, 0, 8, False)),
            opened=[SlotOpen(2, prompt[3:11], 8, pools)], pages=[PageAppend(2, 0, [9])],
        ),
        StepPlan(3, **spans((0, 41, 1, True), (1, 7, 1, True)), closed=[2], masked=[1]),
        StepPlan(4, **spans((0, 42, 1, True)), closed=[1]),
    ]  # fmt: skip


def masks_of(plan: StepPlan) -> StepMasks | None:
    """Those that a plan waits for."""
    return StepMasks(plan.step, MASK * len(plan.masked)) if plan.masked else None


def values(result: StepResult) -> dict[str, Any]:
    """A result as plain values, without the times."""
    found: dict[str, Any] = msgspec.to_builtins(result, str_keys=True)
    del found["timings"]
    rows = {place: packed.rows() for place, packed in result.logprobs.items()}  # bits may differ between ranks and one
    found["logprobs"] = msgspec.to_builtins(rows, str_keys=True)
    return found


def main() -> None:
    rank, size, meeting_point, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
    own = folder / str(rank)
    own.mkdir()
    comm = GlooComm(rank, size, meeting_point, timeout_s=120)
    worker = make_worker(own, comm, dtype="float32")
    facts = worker.load()
    worker.allocate(Allocation(12, 128))
    results = [values(worker.run(plan, masks_of(plan))) for plan in plans()]
    for level in (1, 2):
        worker.sleep(level)
        worker.wake()
        again = [values(worker.run(plan, masks_of(plan))) for plan in plans()]
        assert again == results, f"after sleep at level {level}"
    tokens = torch.tensor([token for result in results for token in result["tokens"]])
    least, most = (comm.all_reduce(tokens.clone(), how) for how in (Reduction.MIN, Reduction.MAX))
    ranks = comm.all_reduce(torch.tensor([float(rank), 1.0]))
    comm.close()
    agree = torch.equal(least, tokens) and torch.equal(most, tokens)
    print(json.dumps({
        "agree": agree, "ranks": ranks.tolist(), "results": results, "n_ranks": facts.n_ranks,
        "weights_bytes": facts.weights_bytes, "free_bytes": facts.room.free_bytes,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
