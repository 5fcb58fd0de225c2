"""Adapters of ranks that are threads: their parts together are the whole, wherever matrices are cut."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adapter_case import DENSE, merged, write_adapter
from family_cases import IDS, checkpoint_of
from thread_ranks import ThreadComm, together

from quire.compute.adapters.files import Adapter, read_adapter
from quire.compute.adapters.places import StackedAdapters, adapters_on
from quire.compute.device.cpu import CpuDevice
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.plain import Plain
from quire.compute.weights.loader import load_model
from quire.config.engine import EngineConfig
from quire.config.mesh import placed
from quire.config.model import read_arch

CASES: dict[str, tuple[str, ...]] = {
    "mimo": DENSE,
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "qwen3_moe": ("q_proj", "o_proj"),
    "qwen3_moe, whole experts": ("q_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


def adapted(folder: pathlib.Path, comm: ThreadComm, *, whole_experts: bool) -> Decoder:
    """One rank's part of the model, with the adapter in its only place."""
    config = EngineConfig(model=str(folder / "model"), tensor_parallel_size=comm.size)
    arch = placed(read_arch(folder / "model"), msgspec.structs.replace(config, enable_expert_parallel=whole_experts))
    device = torch.device("cpu")
    model = load_model(folder / "model", arch, dtype=torch.float32, device=device, max_model_len=64, comm=comm)
    experts = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]
    model.adapters = adapters_on(CpuDevice(), list(model.adaptable()), 1, 16, torch.float32, experts)
    found = read_adapter(str(folder / "a"), "", model, 16, with_experts=bool(experts))
    model.adapters.put(0, model.adapters.keep(found))
    return model


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("family", CASES)
def test_ranks_are_the_merged_whole(
    family: str, n_ranks: int, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]]
) -> None:
    """Two KV heads: two of four ranks have the same one, and the same rows of B."""
    name, _, whole_experts = family.partition(", ")
    oracle = checkpoint_of(name, tmp_path / "model")
    parameters = ["gate_up_proj", "down_proj"] if "moe" in name else []
    write_adapter(tmp_path / "a", oracle, CASES[family], seed=7, target_parameters=parameters)
    places = np.zeros(len(IDS), np.int32)

    def run(comm: ThreadComm) -> list[torch.Tensor]:
        """With the adapter, and without."""
        model = adapted(tmp_path, comm, whole_experts=bool(whole_experts))
        with torch.inference_mode():
            found = []
            for rows in (places, None):
                with model.adapted(rows):
                    found.append(tools["run_chunks"](model, torch.float32, IDS, [len(IDS)]))
        return found

    found, without = zip(*together(n_ranks, run), strict=True)
    assert all(torch.equal(found[0], one) for one in found[1:]), "ranks have the same bits"
    with torch.no_grad():
        plain = oracle(torch.tensor([IDS])).logits[0]
        with merged(oracle, tmp_path / "a") as model:
            expected = model(torch.tensor([IDS])).logits[0]
    assert (found[0] - expected).abs().max() < 5e-4 * expected.abs().max()
    assert (without[0] - plain).abs().max() < 5e-4 * plain.abs().max()
    assert (expected - plain).abs().max() > 0.05


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_in_one_tensor_are_the_merged_ones(
    family: str, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has them, with the oracle's products; rows without the adapter stand among those with it."""
    monkeypatch.setattr("quire.compute.schemes.choice.floating", lambda device, dtype: Plain(dtype))
    oracle = checkpoint_of(family, tmp_path / "model")
    write_adapter(tmp_path / "a", oracle, ("q_proj",), seed=7, target_parameters=["gate_up_proj", "down_proj"])
    model = tools["load"](tmp_path / "model")
    experts = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]
    adapters = StackedAdapters(list(model.adaptable()), 2, 8, torch.float32, CpuDevice(), experts)
    adapters.put(1, adapters.keep(read_adapter(str(tmp_path / "a"), "", model, 8, with_experts=True)))
    model.adapters = adapters
    x, ids, factors = torch.zeros(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    for one in experts:
        assert one.adapted is not None
        one.adapted.build(x, ids, factors, None)
    places, found = np.ones(len(IDS), np.int32), []
    for rows in (places, -places, None):
        with torch.inference_mode(), model.adapted(rows):
            found.append(tools["run_chunks"](model, torch.float32, IDS, [len(IDS)]))
    assert torch.equal(found[1], found[2])
    with torch.no_grad(), merged(oracle, tmp_path / "a"):
        expected = oracle(torch.tensor([IDS])).logits[0]
    assert (found[0] - expected).abs().max() < 5e-4 * expected.abs().max()
    adapters.put(1, adapters.keep(Adapter({}, "", 0)))  # nothing is left of the one that was there
    with torch.inference_mode(), model.adapted(places):
        assert torch.equal(tools["run_chunks"](model, torch.float32, IDS, [len(IDS)]), found[1])
