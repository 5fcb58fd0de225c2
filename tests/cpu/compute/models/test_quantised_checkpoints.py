"""Checkpoints in every coding against transformers, which has the numbers that the codes stand for."""

from __future__ import annotations

import itertools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from coded_checkpoints import FORMATS, fp8, mxfp4_experts, packed, quantise
from family_cases import CASES, IDS, random_checkpoint

from quire.compute.layers.experts import Experts
from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder
from quire.compute.schemes import holding
from quire.compute.schemes.packed import PackedProduct
from quire.compute.schemes.w8a8 import RoundedEightBits
from quire.compute.weights.footprint import Weights
from quire.kernels import native
from quire.kernels.e4m3 import E4M3
from quire.kernels.moe import CodedMatrices
from quire.kernels.qgemm import reference
from quire.kernels.w8a8 import reference as w8a8

Tools = dict[str, Callable[..., Any]]
KEPT = {
    "packed-g128": "int4-g128", "packed-channel": "int4-g128", "packed-8": "int8-g32", "gptq-g128": "int4-g128",
    "gptq-v2-8": "int8", "int8": "int8", "mxfp4": "int4-g32",
}  # fmt: skip
"""Coding → form of the CPU's kernels that holds its integers."""


ON_GPU = {
    **dict.fromkeys((name for name in FORMATS if name.startswith(("packed", "gptq", "awq"))), "int4"),
    "packed-8": "", "gptq-v2-8": "", "int8": "int8", "fp8-blocks": "fp8", "fp8-static": "fp8", "fp8-odd-blocks": "",
    "nvfp4": "nvfp4", "nvfp4-modelopt": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
"""Coding → scheme that holds it on a GPU; empty: none does."""


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
    floating: pathlib.Path, tmp_path: pathlib.Path, tools: Tools, name: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Decoded, in float32; as the CPU's kernels keep them; and as GPUs keep them, by the references of their ops."""
    quantise(floating, tmp_path / "coded", FORMATS[name], tmp_path / "plain")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected, numbers = oracle(torch.tensor([IDS])).logits[0], oracle.state_dict()

    def error(quantization: str) -> tuple[Decoder, float]:
        model = tools["load"](tmp_path / "coded", quantization=quantization)
        found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
        return model, float((found - expected).norm() / expected.norm())

    assert error("none")[1] < 1e-5
    kept = KEPT.get(name, "") if native.library() is not None else ""
    with caplog.at_level(logging.INFO):
        model, found = error("auto")
    assert (f"kept as {kept}" if kept else "decoded into float32, once") in caplog.text
    assert found < (0.15 if kept else 1e-5)
    sizes = Weights(tmp_path / "coded", model.arch, torch.device("cpu")).footprint(torch.float32, "auto")
    assert sizes.held_bytes == model.n_bytes <= sizes.peak_bytes <= sizes.address_bytes
    for linear in model.layers[1].linears if kept else ():
        check_packed(linear, numbers_of(linear, numbers))
    monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS["cuda"])
    model, found = error("auto")
    linears = [linear for layer in model.layers for linear in layer.linears]
    assert {linear.scheme.name for linear in linears} == {ON_GPU[name] or "float32"}
    assert found < (0.3 if ON_GPU[name] in ("int8", "fp8") else 1e-5)
    for linear in linears if ON_GPU[name] else ():
        check_filled(linear, numbers_of(linear, numbers))


def test_rounding_a_quantised_checkpoint_is_told(
    floating: pathlib.Path, tmp_path: pathlib.Path, tools: Tools, caplog: pytest.LogCaptureFixture
) -> None:
    """Another form loses quality again. The own one is kept, and the head, which the file has in full, is rounded."""
    quantise(floating, tmp_path / "coded", FORMATS["packed-g128"], tmp_path / "plain")
    again = "14 matrices of the checkpoint are quantised in another form"
    for quantization, is_again in (("int8", True), ("int4-g128", native.library() is None), ("auto", None)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            tools["load"](tmp_path / "coded", quantization=quantization)
        warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert any(f"--quantization {quantization}: {again}" in one for one in warned) == bool(is_again)
        kept = "quantised matrices keep the checkpoint's own form; others that it rounds: 1"
        assert (f"--quantization {quantization}: {kept}" in caplog.text) == (is_again is False)


def numbers_of(linear: Linear, numbers: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([numbers[f"{part}.weight"] for part, _ in linear.matrix.parts])


def check_packed(linear: Linear, whole: torch.Tensor) -> None:
    """Number for number; and -128, which rounding here never makes, is multiplied rightly too."""
    assert isinstance(linear.product, PackedProduct)
    packed = linear.product.packed
    assert torch.equal(packed.dequantized(), whole), linear.matrix.name
    x = torch.randn(3, packed.k)
    near = {"rtol": 2e-5, "atol": 2e-5 * float(whole.norm(dim=1).max())}
    torch.testing.assert_close(linear(x), reference.linear(x, packed), **near)


def check_filled(linear: Linear, whole: torch.Tensor) -> None:
    """What is stored is what was declared; of 8 bits it is the file's, number for number."""
    tensors = linear.product.tensors
    stored = linear.scheme.stored(linear.matrix.n_out, linear.matrix.n_in)
    declared = {one.name: (one.shape, one.dtype) for one in stored}
    assert {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} == declared
    if "scale" in tensors:
        assert torch.equal(w8a8.dequantise(tensors["weight"], tensors["scale"]).float(), whole)


def test_parts_that_a_file_has_as_one(tmp_path: pathlib.Path, tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v; gate and up: decoded, and as GPUs keep them."""
    random_checkpoint(tmp_path / "floating", "Phi3", num_hidden_layers=1)
    quantise(tmp_path / "floating", tmp_path / "coded", packed(4, 32), tmp_path / "plain")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = oracle(torch.tensor([IDS])).logits[0]
    monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS["cuda"])
    for quantization in ("none", "auto"):
        model = tools["load"](tmp_path / "coded", quantization=quantization)
        found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert {linear.scheme.name for linear in model.layers[0].linears} == {"int4"}


@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_moe", "deepseek_v3", "nvfp4", "mxfp4"])
def test_experts_are_those_of_the_numbers(
    tmp_path: pathlib.Path, tools: Tools, case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a layer in one tensor, with gate and up taking turns; one by one; and rows of heads that take turns.
    Decoded; as the CPU's kernels keep them; and as GPUs do, by the references of their ops."""
    family, fields = CASES["qwen3_moe" if case in FORMATS else case]
    wide = {"moe_intermediate_size": 64} if family == "Qwen3Moe" else {}  # no part of a matrix ends within a tile
    random_checkpoint(tmp_path / "floating", family, **{**fields, **wide})
    if case == "gpt_oss":
        mxfp4_experts(tmp_path / "floating", tmp_path / "coded", tmp_path / "plain")
    else:
        form = FORMATS.get(case) or {"qwen3_moe": packed(4, 32), "deepseek_v3": fp8((32, 32))}[case]
        quantise(tmp_path / "floating", tmp_path / "coded", form, tmp_path / "plain")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    expected = oracle(torch.tensor([IDS])).logits[0]
    plain = tools["load"](tmp_path / "coded", quantization="none")
    found = tools["run_chunks"](plain, torch.float32, IDS, [len(IDS)])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    with caplog.at_level(logging.INFO):
        model = tools["load"](tmp_path / "coded", quantization="auto")
    ffn, decoded = model.layers[1].ffn, plain.layers[1].ffn
    assert isinstance(ffn, Experts) and isinstance(decoded, Experts)
    kept = case in ("gpt_oss", "qwen3_moe", "mxfp4") and native.library() is not None
    assert {linear.scheme.name for linear in ffn.up.linears} == {"int4-g32" if kept else "float32"}
    assert ("kept as int4-g32" if kept else "decoded into float32, once") in caplog.text
    if kept:
        pairs = (zip(a.linears, b.linears, strict=True) for a, b in ((ffn.up, decoded.up), (ffn.down, decoded.down)))
        for one, other in itertools.chain(*pairs):
            numbers = [linear.product.packed.dequantized() for linear in (one, other)]
            assert torch.equal(*numbers), one.matrix.name
        found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
        assert float((found - expected).norm() / expected.norm()) < 0.15
    monkeypatch.setitem(holding.HOLDERS, "cpu", holding.HOLDERS["cuda"])
    model = tools["load"](tmp_path / "coded", quantization="auto")
    ffn = model.layers[1].ffn
    assert isinstance(ffn, Experts)
    held = {"gpt_oss": "mxfp4", "qwen3_moe": "int4", **ON_GPU}.get(case, "float32")
    assert {linear.scheme.name for linear in (*ffn.up.linears, *ffn.down.linears)} == {held}
    assert all(isinstance(bank.matrices, CodedMatrices) == (held != "float32") for bank in (ffn.up, ffn.down))
    if held != "float32":
        of_stack = {id(one) for one in ffn.up.tensors()}
        assert {id(ffn.up.matrices.codes), id(ffn.up.matrices.scales)} <= of_stack, "or sleep would leave them"
    found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    sizes = Weights(tmp_path / "coded", model.arch, torch.device("cpu")).footprint(torch.float32, "auto")
    assert sizes.held_bytes == model.n_bytes <= sizes.peak_bytes <= sizes.address_bytes


def test_experts_rounded_to_fp8(tmp_path: pathlib.Path, tools: Tools) -> None:
    """Each floating until it is rounded into what all of a layer share: the numbers of its own rounding."""
    family, fields = CASES["qwen3_moe"]
    random_checkpoint(tmp_path, family, **fields)
    plain, model = (tools["load"](tmp_path, quantization=one) for one in ("none", "fp8"))
    before, after = (one.layers[1].ffn for one in (plain, model))
    assert isinstance(before, Experts) and isinstance(after, Experts)
    for bank, own in ((before.up, after.up), (before.down, after.down)):
        assert isinstance(own.matrices, CodedMatrices)
        for expert, linear in enumerate(bank.linears):
            floats = bank.matrices[expert] if bank.matrices is not None else linear.product.packed.dequantized()
            rounded = RoundedEightBits(E4M3).finish(floats).tensors
            assert torch.equal(own.matrices[expert], w8a8.dequantise(rounded["weight"], rounded["scale"]).float())
    assert model.n_bytes < plain.n_bytes
    sizes = Weights(tmp_path, model.arch, torch.device("cpu")).footprint(torch.float32, "fp8")
    assert sizes.held_bytes == model.n_bytes
