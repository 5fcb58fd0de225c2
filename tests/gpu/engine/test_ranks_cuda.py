"""Ranks with a GPU each say what one GPU says, eager and with captured steps; NCCL's calls can be captured."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from rank_cases import FAMILIES, NGRAM, SIZE, answers, checkpoint

from quire import LLM, SamplingParams
from quire.core.errors import EngineError
from quire.engine.ranks.judge import LATE_S

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {**SIZE, "device": "cuda"}
MOVING: dict[str, Any] = {
    "enable_eplb": True, "eplb_config": {"num_redundant_experts": 4, "step_interval": 7, "window_size": 4},
}  # fmt: skip
"""Experts move while the engine serves: 8 of them and 4 copies, on two or four ranks."""
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


LINKED = """
import sys, torch
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.pipeline import Pipeline
from quire.config.mesh import Mesh
rank, size = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
connect = lambda place, n, at: NcclComm(place, n, at, device, timeout_s=120)
pipeline = Pipeline(Mesh(pp=size), rank, connect, connect, sys.argv[3], size + 1)
pipeline.join()
rows, asked = torch.empty(700, 512, device=device, dtype=torch.bfloat16), []
for turn in range(60):
    n = 1 + turn * 11
    if pipeline.before is not None:
        pipeline.before.receive(rows[:n]).wait()
    else:
        rows[:n] = turn
    rows[:n] += 1  # as layers do, behind what is received and before what is sent
    if pipeline.after is not None:
        pipeline.after.send(rows[:n])
    else:
        pipeline.back.send(rows[:n, 0].int())
    if rank == 0:
        ids = torch.empty(n, device=device, dtype=torch.int32)
        asked.append((turn, ids, pipeline.back.receive(ids)))
        if len(asked) > size:
            turn, ids, arrival = asked.pop(0)
            arrival.wait()
            assert ids.eq(turn + size).all(), (turn, ids)
torch.cuda.synchronize()
pipeline.close()
"""


EXCHANGED = """
import sys, torch
from quire.compute.dist.exchange import Exchange
from quire.compute.dist.nccl import NcclComm
rank, size = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
comm = NcclComm(rank, size, sys.argv[3], device, timeout_s=120)
comm.join()
torch.manual_seed(5)
counts = [7 * one for one in range(size)]  # the first has none
given = [(torch.randn(n, 64), torch.randint(2 * size, (n, 1)).int(), torch.rand(n, 1)) for n in counts]
x, expert_ids, weights = (one.to(device) for one in given[rank])
factors = torch.arange(2 * rank, 2 * rank + 2, device=device).float()
def compute(rows, own, weights):
    return rows * torch.where(own < 0, 0.0, weights * factors[own.clamp(min=0).long()])
for counts_bytes in (1 << 40, 0):
    one = Exchange(comm, 0, 1, 16, counts_bytes)
    one.begin(counts)
    y = one.run(x, expert_ids, weights, 2, compute)
    torch.testing.assert_close(y, x * weights * expert_ids)
comm.close()
"""


def needs(n_gpus: int) -> None:
    if torch.cuda.device_count() < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def answers_of(model: str) -> list[Any]:
    """Of one GPU."""
    return answers_with(model, {})


def answers_with(model: str, options: dict[str, Any]) -> list[Any]:
    """Of an engine made for it, whose ranks all leave when it ends."""
    llm = LLM(model, **GPU, **options)
    try:
        found = answers(llm)
    finally:
        llm.shutdown()
    assert llm.engine.ranks is None or llm.engine.ranks.loss is None, "NCCL waits for a captured step"
    return found


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_calls_are_captured(n_ranks: int, tmp_path: pathlib.Path) -> None:
    needs(n_ranks)
    command = [sys.executable, "-c", CAPTURED]
    ranks = [subprocess.Popen([*command, str(rank), str(n_ranks), str(tmp_path / "meet")]) for rank in range(n_ranks)]
    assert [rank.wait(180) for rank in ranks] == [0] * n_ranks


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_links_between_stages(n_ranks: int, tmp_path: pathlib.Path) -> None:
    """More steps on their way than stages, in both directions at once: nobody waits for who waits for it."""
    needs(n_ranks)
    command = [sys.executable, "-c", LINKED]
    ranks = [subprocess.Popen([*command, str(rank), str(n_ranks), str(tmp_path / "meet")]) for rank in range(n_ranks)]
    assert [rank.wait(180) for rank in ranks] == [0] * n_ranks


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_rows_are_exchanged(n_ranks: int, tmp_path: pathlib.Path) -> None:
    needs(n_ranks)
    command = [sys.executable, "-c", EXCHANGED]
    ranks = [subprocess.Popen([*command, str(rank), str(n_ranks), str(tmp_path / "meet")]) for rank in range(n_ranks)]
    assert [rank.wait(180) for rank in ranks] == [0] * n_ranks


@pytest.mark.parametrize("n_ranks, n_beside", [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v2"])
def test_data_parallel_ranks_say_what_one_says(name: str, n_ranks: int, n_beside: int, folder: pathlib.Path) -> None:
    """Eager and captured, and with experts divided among all."""
    needs(n_ranks * n_beside)
    model = checkpoint(name, folder / name)
    mesh = {"data_parallel_size": n_ranks, "tensor_parallel_size": n_beside}
    cases: list[dict[str, Any]] = [{**mesh, "enforce_eager": True}, mesh]
    if name == "deepseek_v2":
        experts = {**mesh, "enable_expert_parallel": True}
        cases += [experts | more | {"enforce_eager": eager} for more in ({}, MOVING) for eager in (True, False)]
    for options in cases:
        assert answers_with(model, options) == answers_of(model), options


@pytest.mark.parametrize("n_stages, n_beside", [(2, 1), (3, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v2"])
def test_stages_say_what_one_says(name: str, n_stages: int, n_beside: int, folder: pathlib.Path) -> None:
    """Eager and captured; asleep between. A model has as many layers as stages at least."""
    needs(n_stages * n_beside)
    model = checkpoint(name, folder / f"{name}-4", num_hidden_layers=4)
    mesh = {"pipeline_parallel_size": n_stages, "tensor_parallel_size": n_beside, "enable_sleep_mode": True}
    cases: list[dict[str, Any]] = [{**mesh, "enforce_eager": True}, mesh]
    for options in cases:
        llm = LLM(model, **GPU, **options)
        try:
            found = [answers(llm)]
            llm.sleep(2)
            llm.wake_up()
            found.append(answers(llm))
        finally:
            llm.shutdown()
        assert found == [answers_of(model)] * 2, options


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_steps_are_counted_though_they_are_replayed(options: dict[str, int], tmp_path: pathlib.Path) -> None:
    needs(2)
    llm = LLM(checkpoint("qwen3", tmp_path / "qwen3"), **GPU, **options)
    try:
        answers(llm)
        ranks = llm.engine.ranks
        assert ranks is not None
        time.sleep(1)
        assert len({one.n_done for one in ranks._standings()}) == 1 and ranks._standings()[0].n_done > 20
    finally:
        llm.shutdown()


@pytest.mark.parametrize("number, message", [
    (signal.SIGKILL, r"rank 1 \(process \d+\) ended with SIGKILL"),
    (signal.SIGSTOP, r"rank 1 \(process \d+\), stopped by a signal, made no progress"),
])  # fmt: skip
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_lost_rank_ends_what_rank_0_waits_for(
    number: signal.Signals, message: str, options: dict[str, int], tmp_path: pathlib.Path
) -> None:
    """Also the memory of its GPU is there again afterwards."""
    needs(2)
    model, params = checkpoint("qwen3", tmp_path / "qwen3"), SamplingParams(max_tokens=80, ignore_eos=True)
    llm = LLM(model, **GPU, **options)
    assert llm.engine.ranks is not None
    (pid,) = llm.engine.ranks.pids
    late_s: list[float] = []
    llm.engine.ranks.on_late = lambda: late_s.append(time.monotonic())
    threading.Timer(0.2, os.kill, (pid, number)).start()
    start_s = time.monotonic()
    with pytest.raises(EngineError, match=message):
        while True:
            llm.generate(["one"] * 4, params, use_tqdm=False)
    assert time.monotonic() - start_s < 12
    if number == signal.SIGSTOP and "tensor_parallel_size" in options:  # rank 0 waits for its GPU
        assert late_s and late_s[0] < start_s + 0.2 + LATE_S + 2, "told of long before it is lost"
    llm.shutdown()
    assert time.monotonic() - start_s < 20
    again = LLM(model, **GPU, **options)
    assert answers(again)
    again.shutdown()


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_ranks_say_what_one_says(name: str, n_ranks: int, folder: pathlib.Path) -> None:
    needs(n_ranks)
    model = checkpoint(name, folder / name)
    cases: list[dict[str, Any]] = [{"tensor_parallel_size": n_ranks, "speculative_config": NGRAM}]
    cases += [{"tensor_parallel_size": n_ranks, "enforce_eager": eager} for eager in (True, False)]
    if name in ("qwen2_moe", "deepseek_v2"):
        cases += [{"tensor_parallel_size": n_ranks, "enable_expert_parallel": True} | more for more in ({}, MOVING)]
    for options in cases:
        assert answers_with(model, options) == answers_of(model), options


@pytest.mark.parametrize("n_ranks, degree", [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_ranks_that_share_tokens_say_what_one_says(
    name: str, n_ranks: int, degree: int, tmp_path: pathlib.Path
) -> None:
    """Heads divided, eager and captured, and a ring, of single ranks or of pairs. Chunks are as long as divided steps.
    """
    needs(n_ranks)
    model, found = checkpoint(name, tmp_path / name), []
    shared: dict[str, Any] = {"prefill_context_parallel_size": n_ranks, "max_num_batched_tokens": 1024}
    ring = {**shared, "context_parallel_method": "ring", "ulysses_degree": degree}
    heads = {**shared, "context_parallel_method": "ulysses"}
    longer: dict[str, Any] = {"max_model_len": 2048, "num_gpu_blocks_override": 600,
                              "hf_overrides": {"max_position_embeddings": 4096}}  # fmt: skip
    for options in ({"max_num_batched_tokens": 1024}, heads, {**heads, "enforce_eager": True}, ring):
        llm = LLM(model, **{**GPU, **longer, **options})
        try:
            prompts = [{"prompt_token_ids": [(7 * i + n) % 90 + 1 for i in range(n)]} for n in (1500, 700, 3)]
            said = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
            found.append([list(one.outputs[0].token_ids) for one in said] + answers(llm))
        finally:
            llm.shutdown()
    assert all(one == found[0] for one in found)
