"""Models that ranks share. As a program: a rank, given RANK SIZE MEETING_POINT and a file of its cases, one a line."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import msgspec
import torch
from worker_rank import PARAMS, spans

from quire.compute.dist.comm import Comm
from quire.compute.dist.context_groups import ContextGroups
from quire.compute.dist.gloo import GlooComm
from quire.compute.forward import halved
from quire.compute.platform import platform_of
from quire.compute.worker import Allocation, Worker
from quire.config.engine import EngineConfig
from quire.config.kv import kv_layout
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import QuireError
from quire.core.plan import PageAppend, SlotOpen, StepPlan

N_TOKENS = 16
HALVES = "halves-"
"""How names of cases begin whose prompts are computed in halves."""
PROMPTS = [[(7 * i + 5) % 190 + 1 for i in range(21)], [(11 * i + 3) % 190 + 1 for i in range(9)]]
GREEDY = msgspec.structs.replace(PARAMS, temperature=0.0, prompt_logprobs=-1, logprobs=-1)


def worker_of(
    path: pathlib.Path, comm: Comm | None = None, context: ContextGroups | None = None, **options: Any
) -> Worker:
    """Of the checkpoint at `path`, in float32 if options say nothing else; not loaded. context: where tokens are
    shared."""
    config = EngineConfig(
        **{"device": "cpu", "num_threads": 1, "dtype": "float32", "block_size": 8, "max_num_seqs": 4,
           "max_num_batched_tokens": 64, "max_model_len": 100, **options}
    )  # fmt: skip
    arch, platform = read_arch(path), platform_of(config)
    return Worker(config, resolve(config, arch, platform.name), path, arch, platform, comm, context=context)


def ready(worker: Worker) -> Worker:
    """Loaded, with pages: in the groups of the part of the model that it has."""
    worker.load()
    worker.allocate(Allocation(40, 100, layout=kv_layout(worker.arch, hybrid=False)))
    return worker


def in_halves(worker: Worker) -> Worker:
    """Whose steps of 8 rows and more are cut."""
    halved.TILE_ROWS = 4  # type: ignore[misc]
    runner = worker.runner
    forward = halved.HalvedForward(worker.platform.device, worker.model, runner.pool, runner.tables, least_rows=8)
    runner.put_first(forward)
    return worker


def run(worker: Worker) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens of each prompt, and what `Decoder.logits` made for them, float32 [rows, vocab] a step."""
    model, made = worker.model, []
    original = model.logits

    def logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found = original(hidden, out)
        made.append(found.float().clone())
        return found

    model.logits = logits  # type: ignore[method-assign]
    said: list[list[int]] = [[] for _ in PROMPTS]
    pages = [list(range(1, 9)), list(range(9, 17))]
    for step in range(N_TOKENS):
        if step:
            rows = [(slot, len(prompt) + step - 1, 1, True) for slot, prompt in enumerate(PROMPTS)]
            plan = StepPlan(step, **spans(*rows))
        else:
            plan = StepPlan(
                0, **spans(*((slot, 0, len(prompt), True) for slot, prompt in enumerate(PROMPTS))),
                opened=[SlotOpen(slot, prompt, len(prompt), GREEDY) for slot, prompt in enumerate(PROMPTS)],
                pages=[PageAppend(slot, 0, own) for slot, own in enumerate(pages)],
            )  # fmt: skip
        result = worker.run(plan)
        assert not result.faults
        for slot, token in enumerate(result.tokens):
            said[slot].append(token)
    model.logits = original  # type: ignore[method-assign]
    return said, made


def facts_of(worker: Worker, quantization: str) -> dict[str, int]:
    """Bytes of this rank."""
    pool = worker.runner.pool
    return {
        "held": worker.model.n_bytes, "footprint": worker.footprint("float32", quantization).held_bytes,
        "kv": pool.bytes_per_token,
    }  # fmt: skip


def main() -> None:
    rank, size, meeting_point, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
    comm = GlooComm(rank, size, meeting_point, timeout_s=120)
    for line in cases.read_text().splitlines():
        name, path, options = json.loads(line)
        try:
            worker = ready(worker_of(pathlib.Path(path), comm, **options))
        except QuireError as error:
            torch.save({"refused": str(error)}, cases.with_name(f"{name}.{rank}"))
            continue
        tokens, logits = run(in_halves(worker) if name.startswith(HALVES) else worker)
        found = {"tokens": tokens, "logits": logits, **facts_of(worker, options.get("quantization", "auto"))}
        torch.save(found, cases.with_name(f"{name}.{rank}"))
    comm.close()


if __name__ == "__main__":
    main()
