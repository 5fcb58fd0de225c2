"""`--enable-eplb` and `--eplb-config`: what is refused by name, and which rank has which expert at first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_mesh import sparse  # noqa: F401

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.eplb import EplbConfig, read_eplb
from quire.config.experts import ExpertsSpec
from quire.config.mesh import mesh_of, placed
from quire.config.parameters import layer_parameters
from quire.config.shares import is_held, share_arch
from quire.core.errors import ConfigError
from quire.engine.capacity import whole_bytes

APART: dict[str, Any] = {"enable_expert_parallel": True, "tensor_parallel_size": 4, "enable_eplb": True}


def test_keys_and_defaults_are_those_of_vllm() -> None:
    assert read_eplb(EngineConfig()) is None
    assert read_eplb(EngineConfig(enable_eplb=True)) == EplbConfig()
    assert (EplbConfig().num_redundant_experts, EplbConfig().window_size, EplbConfig().step_interval) == (0, 1000, 3000)
    given = {"num_redundant_experts": 8, "window_size": 5, "step_interval": 5, "policy": "default"}
    assert msgspec.structs.asdict(read_eplb(EngineConfig(enable_eplb=True, eplb_config=given))) == given  # type: ignore[arg-type]


@pytest.mark.parametrize("options, message", [
    ({"eplb_config": {"num_redundant_experts": 2}}, "nothing is balanced without enable_eplb"),
    ({"enable_eplb": True, "eplb_config": {"num_redundant_expert": 2}}, "did you mean num_redundant_experts"),
    ({"enable_eplb": True, "eplb_config": {"what": 2}}, "what is unknown: known are num_redundant_experts"),
    ({"enable_eplb": True, "eplb_config": {"num_redundant_experts": -1}}, "num_redundant_experts.*>= 0"),
    ({"enable_eplb": True, "eplb_config": {"window_size": 0}}, r"Expected `int` >= 1 - at `\$.window_size`"),
    ({"enable_eplb": True, "eplb_config": {"policy": "flat"}}, "flat"),
    ({"enable_eplb": True, "eplb_config": {"use_async": True}}, "use_async = True means nothing here: experts move"),
    ({"enable_eplb": True, "eplb_config": {"log_balancedness": True}}, "each rearrangement is logged"),
    ({"enable_eplb": True, "eplb_config": {"window_size": 9, "step_interval": 8}},
     "window_size = 9 is more than the step_interval = 8"),
])  # fmt: skip
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options).verify()


@pytest.mark.parametrize("changes, message", [
    ({"enable_expert_parallel": False}, "a part of every expert.*add --enable-expert-parallel"),
    ({"tensor_parallel_size": 1}, "one rank has all experts: add --tensor-parallel-size or --data-parallel-size"),
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: experts of stages do not move yet"),
    ({"enable_lora": True, "lora_experts": True}, "adapters of experts do not move with them: leave --lora-experts"),
])  # fmt: skip
def test_what_ranks_cannot_do_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mesh_of(EngineConfig(**APART | changes))


@pytest.mark.parametrize("more, message", [
    (3, r"= 3 and the \d+ experts of a layer are \d+, which 4 ranks cannot share equally: give 0 or 4"),
    (1, r"which 4 ranks cannot share equally: give 0 or 4"),
    (4000, r"= 4000 is more than \d+: with that each of 4 ranks has all \d+ experts already"),
])  # fmt: skip
def test_copies_that_cannot_be_dealt_out_are_refused(sparse: ModelArch, more: int, message: str) -> None:  # noqa: F811
    config = EngineConfig(**APART, eplb_config={"num_redundant_experts": more})
    with pytest.raises(ConfigError, match=message):
        placed(sparse, config)


@pytest.mark.parametrize("n_data, n_ranks", [(1, 4), (2, 2), (4, 1)])
def test_each_slot_is_on_one_rank_and_copies_are_loaded_like_experts(
    sparse: ModelArch, n_data: int, n_ranks: int  # noqa: F811
) -> None:
    config = EngineConfig(
        enable_expert_parallel=True, enable_eplb=True, data_parallel_size=n_data, tensor_parallel_size=n_ranks,
        eplb_config={"num_redundant_experts": 8},
    )  # fmt: skip
    n_experts, seen = sparse.layers[-1].ffn.n_experts, []  # type: ignore[attr-defined]
    for dp_rank in range(n_data):
        whole = placed(sparse, config, dp_rank)
        matrices = layer_parameters(whole.layers[-1], sparse.hidden_size, 0).ffn.matrices
        for rank in range(n_ranks):
            own = share_arch(whole, rank, n_ranks).layers[-1].ffn
            assert isinstance(own, ExpertsSpec) and len(own.held) == own.n_held == (n_experts + 8) // 4
            ups = {place for place, one in matrices.items() if place.startswith("up.") and is_held(one, rank, n_ranks)}
            assert ups == {f"up.{expert}" for expert in own.held}
            seen += own.held
    assert seen == [slot % n_experts for slot in range(n_experts + 8)]


@pytest.mark.parametrize("options", [
    {"tensor_parallel_size": 4}, {"data_parallel_size": 4}, {"enable_expert_parallel": True, "data_parallel_size": 4},
    {"enable_expert_parallel": True, "data_parallel_size": 2, "tensor_parallel_size": 2},
    {**APART, "eplb_config": {"num_redundant_experts": 8}},
])  # fmt: skip
def test_bytes_of_all_weights_follow_from_those_of_a_rank(sparse: ModelArch, options: dict[str, Any]) -> None:  # noqa: F811
    """Of a rank that has two bytes for each number of its part."""
    config = EngineConfig(**options)
    mesh, spec = mesh_of(config), sparse.layers[-1].ffn
    assert isinstance(spec, ExpertsSpec)
    n_sparse = sum(isinstance(layer.ffn, ExpertsSpec) for layer in sparse.layers)
    one = 3 * spec.size * sparse.hidden_size
    n_others = sparse.n_parameters - n_sparse * spec.n_experts * one
    n_held = (spec.n_experts + (8 if config.enable_eplb else 0)) / max(mesh.ep, mesh.tp)
    held_bytes = round(2 * (n_others / mesh.tp + n_sparse * n_held * one))
    assert abs(whole_bytes(config, sparse, held_bytes) - 2 * sparse.n_parameters) <= 2 * mesh.n_ranks
