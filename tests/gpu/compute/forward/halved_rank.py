"""A long step in halves against the same step as a whole. As a program one of several ranks, given RANK SIZE
MEETING_POINT MODEL."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch

from quire.compute.device.cuda import CudaDevice
from quire.compute.dist.comm import Comm
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.halved import LEAST_ROWS, HalvedForward, can_halve
from quire.compute.models.decoder import decoder_on
from quire.compute.runner.batch_builder import build_batch
from quire.compute.runner.pool import KVPool
from quire.compute.runner.step import Step
from quire.compute.runner.tables import NO_WRITES, SlotTables
from quire.config.model import read_arch
from quire.core.plan import PageAppend, Spans, StepPlan

MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
STEPS = [  # slot, start, length, wants a token
    [(0, 0, 1500, True)],
    [(0, 1500, 1, True), (1, 0, 700, True), (2, 0, LEAST_ROWS, False)],
    [(2, LEAST_ROWS, 2000, True), (1, 700, 3, True)],
]


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Its config.json."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@torch.inference_mode()
def check(device: CudaDevice, comm: Comm, folder: pathlib.Path) -> list[torch.Tensor]:
    """States of each step, by halves."""
    torch.manual_seed(comm.rank)
    model = decoder_on(device.torch_device, read_arch(folder), torch.bfloat16, 4096, comm=comm)
    for name, tensor in model.weights():
        tensor.copy_(torch.ones_like(tensor) if "norm" in name else torch.randn_like(tensor) / 32)
    model.finish()
    torch.cuda.synchronize()
    rng, sides, states = np.random.default_rng(0), [], []
    ids, pages = rng.integers(0, 512, (4, 4097)), rng.permutation(np.arange(1, 769))
    for kind in (HalvedForward, EagerForward):
        tables, pool = SlotTables(3, 4096, 16, device), KVPool(model.arch, 769, 16, torch.bfloat16, device)
        assert can_halve(model, pool)
        tables.tokens.copy_(torch.from_numpy(ids))
        for slot in range(3):
            tables.write(tables.append([PageAppend(slot, 0, pages[slot * 256 : slot * 256 + 256].tolist())]))
        more = (LEAST_ROWS,) if kind is HalvedForward else (4096,)
        sides.append((kind(device, model, pool, tables, *more), pool))
    (halved, late), (eager, whole) = sides
    for rows in STEPS:
        spans = Spans()
        for row in rows:
            spans.add(*row)
        step = Step(StepPlan(0, spans), build_batch(spans), NO_WRITES, [], wants_all=False)
        found, expected = halved.run(step), eager.run(step)
        assert found is not None and expected is not None and not found.has_all and not expected.has_all
        error = (found.hidden.float() - expected.hidden.float()).norm() / expected.hidden.float().norm()
        assert float(error) < 0.02, error  # halves are multiplied by other kernels
        for mine, other in ((late.k, whole.k), (late.v, whole.v)):
            error = (mine.float() - other.float()).norm() / other.float().norm()
            assert float(error) < 0.02, error
        states.append(found.hidden)
    torch.cuda.synchronize()
    return states


def main() -> None:
    rank, size, meeting_point, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
    device = CudaDevice(rank)
    comm = PeerComm(NcclComm(rank, size, meeting_point, device.torch_device, timeout_s=120), device.torch_device)
    comm.join()
    for states in check(device, comm, folder):
        assert bool((comm.all_gather(states) == states).all()), "ranks have the same bits"
    comm.check()
    comm.close()


if __name__ == "__main__":
    main()
