"""Ranks with a GPU each say what one GPU says, eager and with captured steps; NCCL's calls can be captured."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from rank_cases import FAMILIES, NGRAM, SIZE, answers, checkpoint

from quire import LLM

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {**SIZE, "device": "cuda"}
CAPTURED = """
import sys, torch
from quire.compute.dist.comm import Reduction
from quire.compute.dist.nccl import NcclComm
rank, size = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
comm = NcclComm(rank, size, sys.argv[3], device, timeout_s=120)
comm.join()
x, made = torch.zeros(5, 64, device=device), {}
def launch():
    made["sum"] = comm.all_reduce(x.clone())
    made["all"] = comm.all_gather(x)
launch()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    launch()
for turn in range(3):
    x.fill_(10.0 * turn + rank)
    graph.replay()
    each = [10.0 * turn + other for other in range(size)]
    assert made["sum"].eq(sum(each)).all(), (turn, made["sum"])
    assert made["all"][:, 0, 0].tolist() == each, (turn, made["all"])
assert comm.all_reduce(torch.tensor([rank]), Reduction.MAX).tolist() == [size - 1], "numbers of the host"
del graph
comm.close()
"""


def needs(n_gpus: int) -> None:
    if torch.cuda.device_count() < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs")


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_calls_are_captured(n_ranks: int, tmp_path: pathlib.Path) -> None:
    needs(n_ranks)
    command = [sys.executable, "-c", CAPTURED]
    ranks = [subprocess.Popen([*command, str(rank), str(n_ranks), str(tmp_path / "meet")]) for rank in range(n_ranks)]
    assert [rank.wait(180) for rank in ranks] == [0] * n_ranks


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_say_what_one_says(name: str, n_ranks: int, tmp_path: pathlib.Path) -> None:
    needs(n_ranks)
    model, found = checkpoint(name, tmp_path / name), []
    cases: list[dict[str, Any]] = [{}, {"tensor_parallel_size": n_ranks, "speculative_config": NGRAM}]
    cases += [{"tensor_parallel_size": n_ranks, "enforce_eager": eager} for eager in (True, False)]
    if name in ("qwen2_moe", "deepseek_v2"):
        cases += [{"tensor_parallel_size": n_ranks, "enable_expert_parallel": True}]
    for options in cases:
        llm = LLM(model, **GPU, **options)
        try:
            found.append(answers(llm))
        finally:
            llm.shutdown()
    assert all(one == found[0] for one in found)
