"""Experts from a checkpoint: both layouts, the tensor of all of them and one laid out by itself, what is refused."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from family_cases import IDS, MOE, checkpoint_of

from quire.bench.shape import FOLDER
from quire.compute.layers.expert_banks import Stack
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.config.experts import RoutingSpec, Scores
from quire.config.model import read_arch
from quire.core.errors import ConfigError, LoadError

Tools = dict[str, Callable[..., Any]]
CPU = torch.device("cpu")
AT = "model.layers.1.mlp.experts."


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    return load_model(folder, read_arch(folder), dtype=dtype, device=CPU, max_model_len=128, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    return folder, checkpoint_of("qwen3_moe", folder)


@pytest.fixture
def changed(made: tuple[pathlib.Path, Any], tmp_path: pathlib.Path) -> Callable[[dict[str, torch.Tensor | None]], None]:
    """Writes the checkpoint into tmp_path with tensors in place of others; None drops one."""

    def write(changes: dict[str, torch.Tensor | None]) -> None:
        tensors = safetensors.torch.load_file(made[0] / "model.safetensors") | changes
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        safetensors.torch.save_file(kept, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((made[0] / "config.json").read_text())

    return write


def test_experts_in_one_tensor_are_read_like_experts_one_by_one(
    made: tuple[pathlib.Path, transformers.PreTrainedModel], tmp_path: pathlib.Path
) -> None:
    folder, oracle = made
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert AT + "0.gate_proj.weight" in stored
    in_memory = {name: tensor.contiguous() for name, tensor in oracle.state_dict().items()}
    assert AT + "gate_up_proj" in in_memory
    safetensors.torch.save_file(in_memory, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for dtype in (torch.float64, torch.bfloat16):
        ours, theirs = load(tmp_path, dtype), load(folder, dtype)
        same(ours, theirs)


def same(ours: Decoder, theirs: Decoder) -> None:
    both = ([tensor for layer in model.layers for tensor in layer.tensors()] for model in (ours, theirs))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "qwen2_moe", "glm4_moe", "deepseek_v2-lite"])
def test_one_tensor_of_all_experts_is_multiplied_at_once(case: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    """In float64 nothing is laid out, as on a GPU."""
    oracle = checkpoint_of(case, tmp_path)
    model = load(tmp_path, torch.float64)
    assert any(isinstance(layer.ffn, Experts) and isinstance(layer.ffn.up, Stack) for layer in model.layers)
    assert model.n_bytes == Weights(tmp_path, model.arch, CPU).footprint(torch.float64, "none").held_bytes
    assert all(linear.weight is None for linear in model.linears()), "views would keep what is moved"
    expected = oracle(torch.tensor([IDS])).logits[0]
    assert (tools["run_chunks"](model, torch.float64, IDS, [17, 23]) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 0.6), ("none", 0.1)])
def test_experts_are_rounded_and_the_router_is_not(
    made: tuple[pathlib.Path, transformers.PreTrainedModel], tools: Tools, quantization: str, most: float
) -> None:
    folder, oracle = made
    model = load(folder, torch.bfloat16, quantization=quantization)
    footprint = Weights(folder, model.arch, CPU).footprint(torch.bfloat16, quantization)
    assert footprint.held_bytes == model.n_bytes <= footprint.peak_bytes
    ffn = model.layers[0].ffn
    assert ffn.router.scheme.name == "bfloat16"
    assert ffn.up.linears[0].scheme.name == (quantization if quantization != "none" else "bfloat16")
    expected = oracle(torch.tensor([IDS])).logits[0]
    got = tools["run_chunks"](model, torch.bfloat16, IDS, [len(IDS)])
    assert (got - expected).norm() / expected.norm() < most


def test_what_experts_lack_is_named_before_memory_is_taken(
    changed: Callable[..., None], tmp_path: pathlib.Path
) -> None:
    arch_of, nowhere = read_arch, torch.device("meta")

    def refused(message: str, **changes: torch.Tensor | None) -> None:
        changed({AT + name.replace("__", "."): tensor for name, tensor in changes.items()})
        with pytest.raises(LoadError, match=message):
            Weights(tmp_path, arch_of(tmp_path), nowhere)

    refused(r"has no tensor '.*experts\.5\.up_proj\.weight'$", **{"5__up_proj__weight": None})
    refused(r"experts\.5\.up_proj\.weight has shape \(31, 64\); config.json implies \(32, 64\)",
            **{"5__up_proj__weight": torch.zeros(31, 64)})  # fmt: skip
    refused(r"does not use: .*experts\.8\.up_proj", **{"8__up_proj__weight": torch.zeros(32, 64)})
    gone = {f"{expert}__{name}_proj__weight": None for expert in range(MOE["num_experts"]) for name in ("gate", "up")}
    whole = torch.zeros(8, 64, 64)
    refused(r"gate_up_proj has shape \(7, 64, 64\); config.json implies 8 experts", **gone, gate_up_proj=whole[:7])
    refused(r"gate_up_proj\[0\] has shape \(63, 64\); .* \(64, 64\)", **gone, gate_up_proj=whole[:, 1:])
    refused(r"gate_up_proj has shape \(\); config.json implies 8 experts", **gone, gate_up_proj=torch.zeros(()))


def test_an_expert_that_is_not_finite_is_named(changed: Callable[..., None], tmp_path: pathlib.Path) -> None:
    changed({AT + "3.down_proj.weight": torch.full((64, 32), torch.nan)})
    with pytest.raises(LoadError, match=r"experts\.3\.down_proj\.weight in .* has NaN"):
        load(tmp_path)


def test_dummy_experts_are_the_same_in_any_layout(made: tuple[pathlib.Path, Any]) -> None:
    folder, _ = made
    ours, theirs = (load(folder, torch.float32, load_format="dummy", seed=3) for _ in range(2))
    same(ours, theirs)
    assert ours.n_bytes == Weights(folder, ours.arch, CPU, "dummy").footprint(torch.float32, "none").held_bytes


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("num_experts", 0, "num_experts"),
        ("num_experts_per_tok", 9, "num_experts_per_tok"),
        ("moe_intermediate_size", 0, "moe_intermediate_size"),
        ("hidden_act", "gelu", "hidden_act"),
        ("decoder_sparse_step", 0, "decoder_sparse_step"),
        ("mlp_only_layers", ["first"], "mlp_only_layers"),
    ],
)
def test_impossible_experts_are_refused_by_the_name_of_their_key(
    made: tuple[pathlib.Path, Any], field: str, value: Any, what: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        read_arch(made[0], {field: value})


def test_many_experts_are_described_quickly() -> None:
    """As many matrices as a large model has: what is linear in them stays so."""
    start_s = time.process_time()
    arch = read_arch(FOLDER / "qwen3-30b-a3b")
    model = decoder_on(torch.device("meta"), arch, torch.bfloat16, 1)
    assert arch.n_parameters == 30_532_122_624
    footprint = Weights(FOLDER / "qwen3-30b-a3b", arch, torch.device("cuda"), "dummy").footprint(torch.bfloat16, "none")
    assert footprint.held_bytes == model.n_bytes
    assert time.process_time() - start_s < 30


def test_a_benchmark_can_put_the_choice_out_of_action(made: tuple[pathlib.Path, Any]) -> None:
    arch = read_arch(made[0], {"even_routing": True})
    assert all(layer.ffn.routing == RoutingSpec(n_chosen=3, scores=Scores.EVEN) for layer in arch.layers)
