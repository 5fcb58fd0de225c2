"""Checkpoints in every coding against transformers, which has the numbers that the codes stand for."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from coded_checkpoints import FORMATS, quantise
from family_cases import IDS, random_checkpoint

from quire.compute.schemes.packed import PackedProduct
from quire.compute.weights.footprint import Weights
from quire.config.model import read_arch
from quire.kernels import native
from quire.kernels.qgemm import reference

KEPT = {
    "packed-g128": "int4-g128", "packed-channel": "int4-g128", "packed-8": "int8-g32", "gptq-g128": "int4-g128",
    "gptq-v2-8": "int8", "int8": "int8",
}  # fmt: skip
"""Coding → form of the CPU's kernels that holds its integers."""


@pytest.fixture(scope="module")
def floating(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Shapes that have odd blocks, and a last group that is not whole, but for the integers."""
    folder = tmp_path_factory.mktemp("floating")
    random_checkpoint(
        folder, "Llama", hidden_size=256, intermediate_size=384, num_hidden_layers=2, head_dim=64, vocab_size=256
    )
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_numbers(
    floating: pathlib.Path, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Decoded, in float32; and where integers are kept, these are the file's, and their products are near."""
    quantise(floating, tmp_path / "coded", FORMATS[name], tmp_path / "plain")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = oracle(torch.tensor([IDS])).logits[0]
    model = tools["load"](tmp_path / "coded", quantization="none")
    found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    with caplog.at_level(logging.INFO):
        model = tools["load"](tmp_path / "coded", quantization="auto")
    fate = f"kept as {KEPT[name]}" if name in KEPT and native.library() is not None else "decoded into float32, once"
    assert fate in caplog.text
    found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
    assert float((found - expected).norm() / expected.norm()) < (0.15 if "kept" in fate else 1e-4)
    arch = read_arch(tmp_path / "coded")
    sizes = Weights(tmp_path / "coded", arch, torch.device("cpu")).footprint(torch.float32, "auto")
    assert sizes.held_bytes == model.n_bytes <= sizes.peak_bytes <= sizes.address_bytes
    if "kept" in fate:
        weights = oracle.state_dict()
        for linear in model.layers[1].linears:
            assert isinstance(linear.product, PackedProduct)
            whole = torch.cat([weights[f"{part}.weight"] for part, _ in linear.matrix.parts])
            packed = linear.product.packed
            assert torch.equal(packed.dequantized(), whole), linear.matrix.name
            x = torch.randn(3, packed.k)
            near = {"rtol": 2e-5, "atol": 2e-5 * float(whole.norm(dim=1).max())}
            torch.testing.assert_close(linear(x), reference.linear(x, packed), **near)
