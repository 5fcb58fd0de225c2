"""Experts by rank: each is on one of the ranks, and what several ranks of one machine may take of its memory."""

from __future__ import annotations

import msgspec
import pytest
from test_shares import SHAPES

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.experts import ExpertsSpec
from quire.config.mesh import mesh_of, placed, undivided
from quire.config.model import read_arch
from quire.config.parameters import Cut, layer_parameters
from quire.config.resolve import resolve
from quire.config.shares import is_held, share_arch, share_layer
from quire.core.errors import ConfigError
from quire.engine.capacity import equation
from quire.planner.memory import EXCHANGE_COPIES, Room

APART = EngineConfig(enable_expert_parallel=True, tensor_parallel_size=4)


@pytest.fixture(scope="module")
def sparse() -> ModelArch:
    found = (read_arch(folder) for folder in sorted(SHAPES.iterdir()))
    return next(arch for arch in found if isinstance(arch.layers[-1].ffn, ExpertsSpec))


def test_each_expert_is_on_one_rank(sparse: ModelArch) -> None:
    assert placed(sparse, EngineConfig(tensor_parallel_size=4)) == sparse
    whole = placed(sparse, APART).layers[-1]
    assert isinstance(whole.ffn, ExpertsSpec)
    matrices = layer_parameters(whole, sparse.hidden_size, 0).ffn.matrices
    seen = []
    for rank in range(4):
        own = share_layer(whole, rank, 4)
        assert isinstance(own.ffn, ExpertsSpec) and own.ffn.size == whole.ffn.size
        held = {place for place, one in matrices.items() if one.cut is Cut.EXPERT and is_held(one, rank, 4)}
        assert held == {f"{part}.{expert}" for expert in own.ffn.held for part in ("up", "down")}
        assert held < layer_parameters(own, sparse.hidden_size, 0).ffn.matrices.keys()
        seen += own.ffn.held
    assert seen == list(range(whole.ffn.n_experts))


@pytest.mark.parametrize("n_data, n_ranks", [(2, 1), (4, 1), (2, 2)])
def test_data_parallel_ranks_divide_the_experts_among_them(sparse: ModelArch, n_data: int, n_ranks: int) -> None:
    config = EngineConfig(enable_expert_parallel=True, data_parallel_size=n_data, tensor_parallel_size=n_ranks)
    seen: list[int] = []
    for dp_rank in range(n_data):
        whole = placed(sparse, config, dp_rank)
        assert undivided(whole) == sparse
        matrices = layer_parameters(whole.layers[-1], sparse.hidden_size, 0).ffn.matrices
        assert len(matrices) == len(layer_parameters(sparse.layers[-1], sparse.hidden_size, 0).ffn.matrices)
        for rank in range(n_ranks):
            own = share_arch(whole, rank, n_ranks).layers[-1].ffn
            assert isinstance(own, ExpertsSpec) and own.size == sparse.layers[-1].ffn.size  # type: ignore[attr-defined]
            held = {place for place, one in matrices.items() if one.cut is Cut.EXPERT and is_held(one, rank, n_ranks)}
            assert held == {f"{part}.{expert}" for expert in own.held for part in ("up", "down")}
            seen += own.held
    assert seen == list(range(sparse.layers[-1].ffn.n_experts))  # type: ignore[attr-defined]
    alone = EngineConfig(enable_expert_parallel=True)
    assert share_arch(placed(sparse, alone), 0, 1) == placed(sparse, alone), "a step of one rank is as it was"


def test_experts_that_data_parallel_ranks_cannot_divide_are_refused(sparse: ModelArch) -> None:
    config = EngineConfig(enable_expert_parallel=True, data_parallel_size=7)
    with pytest.raises(ConfigError, match=r"there are \d+ experts, which 7 ranks cannot share equally"):
        share_arch(placed(sparse, config), 0, 1)


def test_rows_on_their_way_take_memory(sparse: ModelArch) -> None:
    options = {"data_parallel_size": 4, "max_model_len": 1024, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    apart, alone = (EngineConfig(enable_expert_parallel=one, **options) for one in (True, False))  # type: ignore[arg-type]
    limits = resolve(apart, sparse, "cuda")
    with_rows, without = (equation(config, limits, sparse).workspace_bytes for config in (apart, alone))
    assert with_rows - without == 4 * 512 * sparse.hidden_size * 2 * EXCHANGE_COPIES


def test_what_cannot_be_apart_is_refused(sparse: ModelArch) -> None:
    whole = placed(sparse, APART).layers[-1]
    whole = msgspec.structs.replace(whole, ffn=msgspec.structs.replace(whole.ffn, shared=None))
    with pytest.raises(ConfigError, match=r"there are \d+ experts, which 11 ranks cannot share equally"):
        share_layer(whole, 0, 11)
    dense = msgspec.structs.replace(sparse, layers=(read_arch(SHAPES / "qwen3-0.6b").layers[0],))
    with pytest.raises(ConfigError, match="has no experts: leave --enable-expert-parallel out"):
        placed(dense, APART)


def test_ranks_share_main_memory_alone() -> None:
    main = Room(1000, 600, swap_bytes=100, own_bytes=7)
    assert main.of_one(4) == Room(250, 150, swap_bytes=25, own_bytes=7) and main.of_one(1) is main
    of_gpu = Room(1000, 600, is_main=False)
    assert of_gpu.of_one(4) is of_gpu
    assert mesh_of(APART).n_ranks == 4 and mesh_of(EngineConfig()).n_ranks == 1
