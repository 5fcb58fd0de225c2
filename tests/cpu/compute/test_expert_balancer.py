"""Experts that move between two ranks make what they made before, however they are stored; copies take memory.

Ranks are threads of this process, over gloo."""

from __future__ import annotations

import functools
import pathlib
import types
from typing import Any

import pytest
import torch
from family_cases import checkpoint_of
from gloo_ranks import on_ranks

from quire.compute.dist.gloo import GlooComm
from quire.compute.expert_balancer import ExpertBalancer
from quire.compute.layers.expert_copies import ExpertCopies
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.eplb import EplbConfig
from quire.config.mesh import placed
from quire.config.model import read_arch
from quire.core.balance import BalanceFacts, BalanceStage
from quire.core.errors import ConfigError
from quire.engine.executors.balancing import BalancingExecutor
from quire.engine.ranks.rank import Rank
from quire.engine.ranks.wire import SleepRanks
from quire.engine.sleep import AsleepExecutor

CPU = torch.device("cpu")
LIMIT_BYTES = 5000
OPTIONS: dict[str, Any] = {"enable_expert_parallel": True, "tensor_parallel_size": 2, "enable_eplb": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    checkpoint_of("qwen3_moe", folder)
    return folder


def arch_of(folder: pathlib.Path, n_redundant: int) -> ModelArch:
    return placed(read_arch(folder), EngineConfig(**OPTIONS, eplb_config={"num_redundant_experts": n_redundant}))


def balancer_of(model: Decoder, comm: GlooComm) -> ExpertBalancer:
    device = types.SimpleNamespace(synchronize=lambda: None)
    worker = types.SimpleNamespace(model=model, platform=types.SimpleNamespace(device=device))
    return ExpertBalancer(worker, comm, EplbConfig(), LIMIT_BYTES)  # type: ignore[arg-type]


@functools.cache
def rows() -> torch.Tensor:
    """Of which all are nearly alike, so that they choose the same experts."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, 64, generator=generator) + 0.3 * torch.randn(40, 64, generator=generator)


@pytest.mark.parametrize("quantization, n_redundant", [("none", 2), ("none", 0), ("int8", 4), ("int4-g32", 8)])
def test_experts_that_moved_make_what_they_made(
    quantization: str, n_redundant: int, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    arch = arch_of(folder, n_redundant)

    def work(comm: GlooComm) -> tuple[list[torch.Tensor], list[torch.Tensor], Any, list[list[int]]]:
        model = load_model(
            folder, arch, dtype=torch.float32, device=CPU, max_model_len=64, quantization=quantization, comm=comm
        )
        layers = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]
        balancer = balancer_of(model, comm)
        balancer.do(BalanceStage.MARK)
        before = [comm.all_reduce(layer._run(rows(), None)) for layer in layers]
        balancer.do(BalanceStage.PLAN)
        while balancer.n_pending:
            balancer.do(BalanceStage.MOVE)
        after = [comm.all_reduce(layer._run(rows(), None)) for layer in layers]
        slots = [layer.copies.slots for layer in layers if isinstance(layer.copies, ExpertCopies)]
        return before, after, balancer.facts, slots

    (before, after, facts, slots), (_, _, _, same) = on_ranks(2, tmp_path, work)
    assert slots == same and len(slots) == len(before) == 3
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if n_redundant == 8:  # both ranks have all
        assert facts.n_moved == 0 and facts.before == facts.after
    else:
        assert facts.n_moved > 0 and facts.moved_bytes > 0 and facts.n_rearranged == 1
        assert 1 <= facts.after < facts.before <= 2 and facts.last_s >= facts.longest_s > 0


def test_ranks_with_other_rows_choose_alike(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def work(comm: GlooComm) -> list[list[int]]:
        model = load_model(folder, arch_of(folder, 2), dtype=torch.float32, device=CPU, max_model_len=64, comm=comm)
        balancer = balancer_of(model, comm)
        balancer.do(BalanceStage.MARK)
        for layer in model.layers:
            assert isinstance(layer.ffn, Experts)
            layer.ffn.choose(rows() if comm.rank else -rows()[:10])
        balancer.do(BalanceStage.PLAN)
        return [slots for _, slots in balancer._pending]

    first, second = on_ranks(2, tmp_path, work)
    assert first == second != []


def test_loads_outside_the_window_do_not_count(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def work(comm: GlooComm) -> tuple[float, int]:
        model = load_model(folder, arch_of(folder, 2), dtype=torch.float32, device=CPU, max_model_len=64, comm=comm)
        balancer = balancer_of(model, comm)
        for layer in model.layers:
            assert isinstance(layer.ffn, Experts)
            layer.ffn.choose(rows())
        balancer.do(BalanceStage.MARK)
        balancer.do(BalanceStage.PLAN)
        return balancer.facts.before, balancer.n_pending

    assert on_ranks(2, tmp_path, work) == [(0.0, 0)] * 2


def test_sleep_ends_a_rearrangement_and_voids_what_was_said(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Rank 0 as its executor is shut down, the other one as it is told to sleep; then both go on."""

    def work(comm: GlooComm) -> tuple[list[int], list[BalanceFacts]]:
        model = load_model(folder, arch_of(folder, 2), dtype=torch.float32, device=CPU, max_model_len=64, comm=comm)
        balancer, n_pending, facts = balancer_of(model, comm), [], []
        others: Any = types.SimpleNamespace(sleep=lambda level: None), None, None
        for is_cut in (True, False):
            balancer.do(BalanceStage.MARK)
            for layer in model.layers:
                layer.ffn.load += torch.arange(8) ** 2  # type: ignore[attr-defined]
            balancer.do(BalanceStage.PLAN)
            n_pending.append(balancer.n_pending)
            for _ in range(1 if is_cut else balancer.n_pending):
                balancer.do(BalanceStage.MOVE)
            facts.append(balancer.facts)
            if comm.rank:
                Rank(*others, balancer, others[1]).do(SleepRanks(1))
            else:
                BalancingExecutor(AsleepExecutor(), others[1], others[1], balancer, EplbConfig()).shutdown()
            assert balancer.n_pending == 0 and balancer.facts.before == balancer.facts.after == 0
            facts.append(balancer.facts)
        return n_pending, facts

    for n_pending, (before, cut, whole, end) in on_ranks(2, tmp_path, work):
        assert n_pending == [3, 2], "those that had not moved are chosen again"
        assert before == BalanceFacts() and whole.before > whole.after > 0
        assert [one.n_rearranged for one in (cut, whole, end)] == [1, 2, 2]
        assert 0 < cut.n_moved < whole.n_moved == end.n_moved


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_copies_are_counted_before_they_are_loaded(quantization: str, folder: pathlib.Path) -> None:
    held, comm = {}, GlooComm(1, 2, "")  # which asks the other nothing
    for n_redundant in (0, 2, 6):
        arch = arch_of(folder, n_redundant)
        footprint = Weights(folder, arch, CPU, comm=comm).footprint(torch.float32, quantization)
        model = load_model(
            folder, arch, dtype=torch.float32, device=CPU, max_model_len=64, quantization=quantization, comm=comm
        )
        held[n_redundant] = model.n_bytes
        assert footprint.held_bytes == model.n_bytes
        assert all(len(layer.ffn.slot_tensors()) == 4 + n_redundant // 2 for layer in model.layers)  # type: ignore[attr-defined]
    assert held[6] - held[2] == 2 * (held[2] - held[0]) > 0


def test_experts_that_are_not_alike_cannot_move(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def work(comm: GlooComm) -> None:
        model = load_model(folder, arch_of(folder, 0), dtype=torch.float32, device=CPU, max_model_len=64, comm=comm)
        layer = model.layers[1].ffn
        assert isinstance(layer, Experts)
        real = layer.slot_tensors
        layer.slot_tensors = lambda: [[*real()[0], torch.zeros(1)], *real()[1:]]  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="are stored in several ways, so that they cannot move"):
            balancer_of(model, comm)

    on_ranks(2, tmp_path, work)
