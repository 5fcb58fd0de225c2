"""Adapters of ranks that are threads: their parts together are the whole, wherever matrices are cut."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adapter_case import DENSE, merged, write_adapter
from family_cases import IDS, checkpoint_of
from thread_ranks import ThreadComm, together

from quire.compute.adapters.bank import adapters_on
from quire.compute.adapters.files import read_adapter
from quire.compute.device.cpu import CpuDevice
from quire.compute.models.decoder import Decoder
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch

EXPERTS = ("gate_up_proj", "down_proj")
CASES: dict[str, tuple[str, ...]] = {
    "mimo": DENSE,
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


def adapted(folder: pathlib.Path, comm: ThreadComm | None) -> Decoder:
    """One rank's part of the model, with the adapter in its only place."""
    arch = read_arch(folder / "model")
    device = torch.device("cpu")
    model = load_model(folder / "model", arch, dtype=torch.float32, device=device, max_model_len=64, comm=comm)
    linears = list(model.adaptable())
    model.adapters = adapters_on(CpuDevice(), linears, 1, 16, torch.float32)
    model.adapters.put(0, model.adapters.keep(read_adapter(str(folder / "a"), "", model, 16)))
    return model


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("family", CASES)
def test_ranks_are_the_merged_whole(
    family: str, n_ranks: int, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]]
) -> None:
    """Two KV heads: two of four ranks have the same one, and the same rows of B."""
    oracle = checkpoint_of(family, tmp_path / "model")
    write_adapter(tmp_path / "a", oracle, CASES[family], seed=7, use_rslora=True)
    places = np.zeros(len(IDS), np.int32)

    def run(comm: ThreadComm) -> list[torch.Tensor]:
        """With the adapter, and without."""
        model = adapted(tmp_path, comm)
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
