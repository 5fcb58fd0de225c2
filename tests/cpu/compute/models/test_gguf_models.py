"""Models from GGUF files against transformers: the checkpoint that was written, and its reading of the same file."""

from __future__ import annotations

import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.compute.schemes import choice
from quire.config.gguf import read_header
from quire.config.model import read_arch
from quire.core.errors import LoadError
from quire.kernels.mxfp4 import Fp4Weight
from quire.kernels.mxfp4 import reference as mxfp4

IDS = list(range(3, 60))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # family of transformers, architecture of the file, fields of config.json, keys of the file
    "llama": ("Llama", "llama", {}, {}),
    "llama tied": ("Llama", "llama", {"tie_word_embeddings": True}, {}),
    "llama bias": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama 3 rope": ("Llama", "llama", {"rope_parameters": LLAMA3}, {}),
    "llama linear": (
        "Llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ),
    "llama yarn": (
        "Llama", "llama",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
    ),
    "mistral": ("Mistral", "llama", {"sliding_window": 16}, {"attention__sliding_window": 16}),
    "qwen2": ("Qwen2", "qwen2", {}, {}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 32}, {}),
    "qwen3 tied": ("Qwen3", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits(
    case: str, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    family, architecture, fields, keys = CASES[case]
    oracle = tools["random_checkpoint"](tmp_path / "hf", family, **fields)
    path = write_gguf(tmp_path / "m.gguf", oracle, architecture, **keys)
    theirs, ours = read_arch(tmp_path / "hf"), read_arch(path)
    assert ours.windows == theirs.windows and ours.tie_embeddings == theirs.tie_embeddings
    assert (ours.vocab_size, ours.max_position, ours.dtype) == (theirs.vocab_size, theirs.max_position, "float32")
    found = tools["run_chunks"](tools["load"](path), torch.float32, IDS, [len(IDS)])
    torch.testing.assert_close(found, oracle(torch.tensor([IDS])).logits[0], rtol=1e-3, atol=2e-4)


def medium(name: str) -> str:
    """Types as llama.cpp mixes them in Q4_K_M: some matrices with more bits."""
    return "Q6_K" if name.startswith(("output.", "token_embd")) or ".attn_v." in name else "Q4_K"


def legacy(name: str) -> str:
    """A type for each matrix of a layer, fused ones mixed within."""
    kinds = {"attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q5_K"}
    return next((kind for part, kind in kinds.items() if f".{part}." in name), "Q4_0")


@pytest.mark.parametrize(
    "dtype",
    [
        *("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ4_NL", "IQ4_XS", "MXFP4", medium, legacy),
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logits_of_the_same_file(
    family: str,
    dtype: str | Callable[[str], str],
    tmp_path: pathlib.Path,
    tools: dict[str, Callable[..., Any]],
    write_gguf: Callable[..., Any],
) -> None:
    """transformers dequantises the file itself."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    head_dim = 64 if family == "Llama" else 128  # transformers does not read the key of qwen3
    model = tools["random_checkpoint"](tmp_path / "hf", family, head_dim=head_dim, **sizes)
    path = write_gguf(tmp_path / "m.gguf", model, family.lower(), dtype)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    oracle = AutoModelForCausalLM.from_config(config).eval()
    oracle.load_state_dict(load_gguf_checkpoint(path, return_tensors=True, model_to_load=oracle)["tensors"])
    found = tools["run_chunks"](tools["load"](path), torch.float32, IDS, [len(IDS)])
    torch.testing.assert_close(found, oracle(torch.tensor([IDS])).logits[0], rtol=1e-3, atol=5e-4)


def test_flipped_bytes(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    """A damaged file is refused, or gives a model without NaN; it never crashes."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 40}
    model = tools["random_checkpoint"](tmp_path / "hf", "Llama", **sizes)
    path = write_gguf(tmp_path / "m.gguf", model, "llama", "Q8_0")
    whole, chance, n_refused = path.read_bytes(), random.Random(0), 0
    for round_number in range(200):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        path.write_bytes(damaged)
        os.utime(path, ns=(round_number, round_number))
        try:
            loaded = tools["load"](path, max_model_len=16)
        except LoadError:
            n_refused += 1
            continue
        assert loaded.embed.weight.isfinite().all() and loaded.norm.weight.isfinite().all()
    assert 50 < n_refused < 190, n_refused


def test_refused_weights(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    model = tools["random_checkpoint"](tmp_path / "hf", "Llama", num_hidden_layers=1, hidden_size=32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(LoadError, match=r"mlp\.down_proj\.weight .*NaN"):
        tools["load"](write_gguf(tmp_path / "nan.gguf", model, "llama"))
    data = bytearray(write_gguf(tmp_path / "scale.gguf", model, "llama", "Q8_0").read_bytes())
    path = tmp_path / "renamed.gguf"
    path.write_bytes(data.replace(b"blk.0.attn_v", b"blk.0.attn_x"))
    with pytest.raises(LoadError, match=r"blk\.0\.attn_x\.weight"):
        tools["load"](path)


@pytest.mark.parametrize(
    ("family", "dtype", "scheme", "fields"),
    [
        ("Llama", "Q8_0", "int8-g32", {"tie_word_embeddings": True}),
        ("Llama", "Q4_0", "int4-g32", {"attention_bias": True}),
        ("Qwen3", "Q4_0", "int8-g32", {}),
        ("Qwen3", "Q4_0", "int4-g32", {"tie_word_embeddings": True}),
    ],
)
def test_blocks_are_held_as_they_are(
    family: str,
    dtype: str,
    scheme: str,
    fields: dict[str, Any],
    tmp_path: pathlib.Path,
    tools: dict[str, Callable[..., Any]],
    write_gguf: Callable[..., Any],
) -> None:
    """Matrices have the numbers of the file, while bfloat16 would round them; logits are close to float32's."""
    sizes = {"hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}
    oracle = tools["random_checkpoint"](tmp_path / "hf", family, **sizes, **fields)
    path = write_gguf(tmp_path / "m.gguf", oracle, family.lower(), dtype)
    plain = tools["load"](path)
    model = tools["load"](path, torch.bfloat16, quantization=scheme)
    for ours, theirs in zip(model.linears(), plain.linears(), strict=True):
        assert ours.product.packed.scheme == scheme
        assert torch.equal(ours.product.packed.dequantized(), theirs.product.packed.dequantized())
        assert ours.bias is None or torch.equal(ours.bias.float(), theirs.bias.bfloat16().float())
    assert torch.equal(model.embed.weight, plain.embed.weight.bfloat16())
    found, expected = (tools["run_chunks"](one, one.dtype, IDS, [len(IDS)]).float() for one in (model, plain))
    assert float((found - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize(("dtype", "scheme"), [("Q4_0", "int4"), ("MXFP4", "mxfp4")])
def test_a_gpu_keeps_blocks_of_4_bits(
    dtype: str, scheme: str, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]],
    write_gguf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As GPUs keep them, by the reference of their op: the file's numbers, and other types decoded. Rows of q and k
    take turns, the head is tied, q, k and v are one."""
    sizes = {"hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}
    oracle = tools["random_checkpoint"](tmp_path / "hf", "Llama", **sizes, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", oracle, "llama", lambda name: "Q8_0" if "ffn_down" in name else dtype)
    plain = tools["load"](path, quantization="none")
    held_on = choice.held_on
    monkeypatch.setattr(choice, "held_on", lambda device, dtype: held_on(torch.device("cuda"), dtype))
    model = tools["load"](path, quantization="auto")
    block = model.layers[0]
    kept = [one.scheme.name for one in (block.mixer.qkv, block.mixer.out, block.ffn.up, block.ffn.down, model.head)]
    assert kept == [scheme, scheme, scheme, "float32", scheme]
    if dtype == "MXFP4":
        for ours, theirs in zip(model.linears(), plain.linears(), strict=True):
            if ours.scheme.name == scheme:
                numbers = mxfp4.dequantise(Fp4Weight(ours.matrix.n_in, **ours.product.tensors), torch.float32)
                assert torch.equal(numbers, theirs.product.packed.dequantized())
    found, expected = (tools["run_chunks"](one, torch.float32, IDS, [len(IDS)]) for one in (model, plain))
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_auto_keeps_blocks_and_rounds_nothing(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    """Layer by layer: Q4_0 in 4 bits, Q8_0 and a mixture of both in 8, everything else in the model's dtype."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    oracle = tools["random_checkpoint"](tmp_path / "hf", "Qwen3", **sizes)

    def kind(name: str) -> str:
        kinds = {"attn_k": "Q8_0", "attn_q": "Q4_0", "attn_v": "Q4_0", "ffn_down": "Q8_0", "ffn_up": "Q6_K"}
        return next((kind for part, kind in kinds.items() if f".{part}." in name), "Q4_0")

    path = write_gguf(tmp_path / "m.gguf", oracle, "qwen3", kind)
    plain, model = (tools["load"](path, torch.bfloat16, quantization=one) for one in ("none", "auto"))
    exact = tools["load"](path)
    block, held = model.layers[0], {"qkv": "int8-g32", "out": "int4-g32", "up": "bfloat16", "down": "int8-g32"}
    layers = {"qkv": block.mixer.qkv, "out": block.mixer.out, "up": block.ffn.up, "down": block.ffn.down}
    assert {name: layer.product.packed.scheme for name, layer in layers.items()} == held
    assert model.head.product.packed.scheme == "int4-g32"
    for ours, theirs in zip(model.linears(), exact.linears(), strict=True):
        expected = theirs.product.packed.dequantized()
        same = torch.equal(ours.product.packed.dequantized(), expected)
        assert same == (ours.product.packed.scheme != "bfloat16")
    assert {one.product.packed.scheme for one in plain.linears()} == {"bfloat16"}
    assert model.n_bytes < plain.n_bytes


def test_what_cannot_be_held_is_rounded(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any]
) -> None:
    """Parts that end within a tile of rows, and types that a scheme lacks: as from any other file."""
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "head_dim": 32,
        "num_key_value_heads": 1,
    }
    oracle = tools["random_checkpoint"](tmp_path / "hf", "Qwen3", **sizes)
    path = write_gguf(tmp_path / "m.gguf", oracle, "qwen3", "Q8_0")
    plain = tools["load"](path)
    for scheme, held in (("int8-g32", {"up": False, "down": True}), ("int4", {"up": False, "down": False})):
        model = tools["load"](path, torch.bfloat16, quantization=scheme)
        for name, exact in held.items():
            ours, theirs = (getattr(one.layers[0].ffn, name).product.packed.dequantized() for one in (model, plain))
            assert torch.equal(ours, theirs) == exact, name
            assert float((ours - theirs).norm() / theirs.norm()) < 0.1


def test_a_scale_that_is_not_finite_is_refused(
    tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]], write_gguf: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Kept, and of MXFP4 decoded too, where an exponent of 255 is NaN."""
    oracle = tools["random_checkpoint"](tmp_path / "hf", "Qwen3", hidden_size=64, intermediate_size=64, head_dim=64)
    held_on = choice.held_on
    for dtype, scale, quantization in (
        ("Q8_0", b"\x00\x7c", "int8-g32"),
        ("MXFP4", b"\xff", "none"),
        ("MXFP4", b"\xff", "auto"),
    ):
        path = write_gguf(tmp_path / f"{dtype}.gguf", oracle, "qwen3", dtype)
        tensor = read_header(path).tensors["blk.0.ffn_down.weight"]
        data = bytearray(path.read_bytes())
        data[tensor.start : tensor.start + len(scale)] = scale
        path.write_bytes(data)
        if dtype == "MXFP4":
            monkeypatch.setattr(choice, "held_on", lambda device, dtype: held_on(torch.device("cuda"), dtype))
        with pytest.raises(LoadError, match=r"down_proj.* NaN or infinite" + " scales" * (quantization != "none")):
            tools["load"](path, quantization=quantization)
