"""GGUF files of many architectures, laid out as llama.cpp's converter does it, against transformers' models of the
same numbers."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import CASES, IDS, random_checkpoint
from gguf_experts import ffns, numbers_of
from gguf_families import CAPS, write_family

from quire.compute.weights.gguf_blocks import DECODERS
from quire.config.gguf import read_header
from quire.config.model import read_arch
from quire.config.model_fields import FULL, SLIDING
from quire.core.errors import LoadError
from quire.kernels import native

Tools = dict[str, Callable[..., Any]]
GEMMA = {"query_pre_attn_scalar": 32}
LINEAR = {
    FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    SLIDING: {"rope_type": "default", "rope_theta": 5e3},
}


def factors(case: str) -> dict[str, Any]:
    """Tensors of a file."""
    rope = CASES[case][1]["rope_parameters"]
    return {f"rope_factors_{one}__weight": np.array(rope[f"{one}_factor"], np.float32) for one in ("short", "long")}


FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # case of `family_cases` → architecture of the file, other fields of config.json, other keys
    "qwen3_moe": ("qwen3moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {}),
    "mixtral": ("llama", {}, {"rope__dimension_count": 16}),
    "mixtral-window": ("llama", {}, {"attention__sliding_window": 9}),
    "qwen2_moe": ("qwen2moe", {"mlp_only_layers": []}, {}),
    "gemma2": ("gemma2", GEMMA, {"rope__freq_base": None}),
    "gemma2-no-caps": ("gemma2", {"query_pre_attn_scalar": 16}, dict.fromkeys(CAPS, 0.0)),
    "phi3": ("phi3", {"sliding_window": None}, {"rope__dimension_count": 16, "attention__sliding_window": 0}),
    "phi3-window": ("phi3", {}, {"attention__sliding_window": 9}),
    "phi3-partial": ("phi3", {}, {"rope__dimension_count": 12}),
    "phi3-long": ("phi3", {}, {
        **factors("phi3-long"), "rope__scaling__original_context_length": 32,
        "rope__scaling__attn_factor": (1 + math.log(4) / math.log(32)) ** 0.5}),
    "phi3-short": ("phi3", {}, {
        **factors("phi3-short"), "rope__scaling__original_context_length": 128, "context_length": 512,
        "rope__scaling__attn_factor": (1 + math.log(4) / math.log(128)) ** 0.5}),
    "olmo2": ("olmo2", {}, {}),
    "gemma": ("gemma", {}, {"rope__freq_base": None}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}, {"rope__dimension_count": 16}),
    "olmoe": ("olmoe", {}, {}),
    "granite": ("granite", {}, {"rope__dimension_count": 16}),
    "granite-bias": ("granite", {}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "glm4": ("glm4", {}, {"rope__dimension_count": 16}),
    "glm4_moe": ("glm4moe", {"head_dim": 16}, {"rope__dimension_count": 8, "expert_gating_func": 2}),
    "glm4_moe-groups": ("glm4moe", {"n_group": 1, "topk_group": 1, "head_dim": 16}, {"rope__dimension_count": 8}),
    "glm4-no-bias": ("glm4", {}, {"rope__dimension_count": 8}),
    "gemma3": ("gemma3", {**GEMMA, "sliding_window_pattern": 6, "num_hidden_layers": 7}, {}),
    "gemma3-cap": ("gemma3", {**GEMMA, "rope_parameters": LINEAR}, {
        "final_logit_softcapping": 9.0, "rope__scaling__type": "linear", "rope__scaling__factor": 4.0,
        "rope__freq_base_swa": 5e3}),
}  # fmt: skip


def made(
    case: str, folder: pathlib.Path, dtype: Callable[[str], str] = lambda name: "F32",
    sizes: dict[str, Any] | None = None, **more: Any,
) -> tuple[Any, pathlib.Path]:  # fmt: skip
    """(transformers' model of the file's numbers, the file). sizes: further fields of config.json; more: keys."""
    architecture, fields, keys = FILES[case]
    family, own = CASES[case]
    oracle = random_checkpoint(folder / "hf", family, **{**own, **fields, **(sizes or {})})
    return oracle, write_family(folder / "m.gguf", oracle, architecture, dtype, **{**keys, **more})


@pytest.mark.parametrize("case", FILES)
def test_logits(case: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    oracle, path = made(case, tmp_path)
    theirs, ours = read_arch(tmp_path / "hf"), read_arch(path)
    assert (ours.family, ours.windows, ours.tie_embeddings) == (theirs.family, theirs.windows, theirs.tie_embeddings)
    found = tools["run_chunks"](tools["load"](path, max_model_len=64), torch.float32, IDS, [len(IDS)])
    with torch.inference_mode():
        expected = oracle(torch.tensor([IDS])).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_norms_of_gemma_are_those_of_the_checkpoint(tmp_path: pathlib.Path, tools: Tools) -> None:
    """1 + w in the file is w of a bfloat16 checkpoint, bit for bit, as are the other weights."""
    oracle = random_checkpoint(tmp_path / "hf", "Gemma3", dtype=torch.bfloat16, **CASES["gemma3"][1], **GEMMA)
    path = write_family(tmp_path / "m.gguf", oracle, "gemma3")
    ours, theirs = (dict(tools["load"](one, torch.bfloat16).weights()) for one in (path, tmp_path / "hf"))
    norms = [name for name in theirs if "norm" in name]
    assert len(norms) == 3 * 6 + 1 and all(torch.equal(ours[name], theirs[name]) for name in norms)
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])


@pytest.mark.parametrize(("case", "n_layers", "width"), [("gemma2", 46, 8), ("gemma3", 62, 8), ("gemma3", 46, 32)])
def test_queries_of_the_largest_gemma_are_divided_by_another_width(
    case: str, n_layers: int, width: int, tmp_path: pathlib.Path
) -> None:
    """hidden_size / heads, not a head's, as llama.cpp has it: no key says so."""
    _, path = made(case, tmp_path, sizes={"num_hidden_layers": n_layers, "hidden_size": 32})
    assert {layer.mixer.scale for layer in read_arch(path).layers} == {width**-0.5}


def test_the_gate_of_a_shared_expert_may_be_a_vector(tmp_path: pathlib.Path, tools: Tools) -> None:
    """As files of 2024 have it; written as it is in a checkpoint it is a matrix of one row."""
    oracle, path = made("qwen2_moe", tmp_path)
    gates = [value for name, value in oracle.state_dict().items() if name.endswith("shared_expert_gate.weight")]
    vectors = {f"blk__{layer}__ffn_gate_inp_shexp__weight": gate[0].numpy() for layer, gate in enumerate(gates)}
    old = write_family(tmp_path / "old.gguf", oracle, "qwen2moe", **vectors)
    shapes = [read_header(one).tensors["blk.0.ffn_gate_inp_shexp.weight"].shape for one in (path, old)]
    assert shapes == [(1, 64), (64,)]
    ours, theirs = (tools["run_chunks"](tools["load"](one), torch.float32, IDS, [len(IDS)]) for one in (old, path))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["F32", "Q4_0"])
def test_experts_may_be_apart(dtype: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    """A tensor for each, as the first files of Mixtral have them."""
    oracle, path = made("mixtral", tmp_path, lambda _: dtype)
    old = write_family(tmp_path / "old.gguf", oracle, "llama", lambda _: dtype, apart=True)
    assert "blk.0.ffn_gate.4.weight" in read_header(old).tensors
    ours, theirs = (tools["run_chunks"](tools["load"](one), torch.float32, IDS, [len(IDS)]) for one in (old, path))
    assert torch.equal(ours, theirs)


def test_the_layer_of_a_module_is_left_out(tmp_path: pathlib.Path, tools: Tools) -> None:
    """Files of GLM-4.5 count its layer among the blocks."""
    one = np.ones((8, 8), np.float32)
    names = (
        *("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.embed_tokens", "nextn.shared_head_head"),
        *("nextn.shared_head_norm", "attn_norm", "attn_q", "ffn_gate_inp", "ffn_gate_exps", "post_attention_norm"),
    )
    more = {f"blk.3.{name}.weight": one for name in names} | {"blk.3.exp_probs_b.bias": one[0]}
    oracle, path = made("glm4_moe", tmp_path)
    keys = {"rope__dimension_count": 8, "block_count": 4, **more}
    with_module = write_family(tmp_path / "n.gguf", oracle, "glm4moe", nextn_predict_layers=1, **keys)
    assert read_arch(with_module).n_layers == 3
    ours, theirs = (tools["run_chunks"](tools["load"](file), torch.float32, IDS, [40]) for file in (with_module, path))
    assert torch.equal(ours, theirs)
    with pytest.raises(LoadError, match=r"model\.layers\.3\."):
        tools["load"](write_family(tmp_path / "o.gguf", oracle, "glm4moe", **keys))


@pytest.mark.parametrize("case", FILES)
@pytest.mark.skipif(native.library() is None, reason="blocks are kept by compiled kernels")
def test_kept_blocks_are_those_that_are_decoded(case: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    """Rows in their places, of whatever order a file has them in; of decoded ones transformers gives the logits."""
    sizes = {"shared_expert_intermediate_size": 64} if case == "qwen2_moe" else {}
    oracle, path = made(case, tmp_path, lambda _: "Q8_0", sizes)
    plain, model = (tools["load"](path, max_model_len=64, quantization=one) for one in ("none", "auto"))
    schemes = {linear.scheme.name for linear in model.linears()}
    assert "int8-g32" in schemes
    for ours, theirs in zip(model.linears(), plain.linears(), strict=True):
        assert torch.equal(ours.product.packed.dequantized(), theirs.product.packed.dequantized()), ours.matrix.name
    found = tools["run_chunks"](plain, torch.float32, IDS, [len(IDS)])
    with torch.inference_mode():
        expected = oracle(torch.tensor([IDS])).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_K"])
def test_fused_matrices_are_read_apart(dtype: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    """Blocks of q, k and v in one tensor, and of gate and up, bit for bit."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    _, path = made("phi3", tmp_path, lambda _: dtype, sizes, rope__dimension_count=64)
    for quantization in ("none", "auto"):
        (layer,) = tools["load"](path, quantization=quantization).layers
        kept = quantization == "auto" and dtype != "Q4_K" and native.library() is not None
        for linear, name in ((layer.mixer.qkv, "attn_qkv"), (layer.ffn.up, "ffn_up"), (layer.ffn.down, "ffn_down")):
            assert (linear.scheme.name in ("int4-g32", "int8-g32")) == kept
            assert torch.equal(linear.product.packed.dequantized(), numbers_of(path, f"blk.0.{name}.weight"))


@pytest.mark.parametrize("dtype", ["F16", "BF16", *DECODERS])
def test_experts_of_any_type(dtype: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    """Bit for bit as the package decodes them; as many as stay blocks do so."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 3}
    _, path = made("qwen3_moe", tmp_path, lambda name: dtype if "exps" in name else "F32", sizes)
    for quantization in ("none", "auto"):
        (ffn,) = ffns(tools["load"](path, quantization=quantization))
        gate, up, down = (numbers_of(path, f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        for expert, (first, last) in enumerate(zip(ffn.up.linears, ffn.down.linears, strict=True)):
            kept = quantization == "auto" and dtype in ("Q4_0", "Q8_0", "MXFP4") and native.library() is not None
            assert (first.scheme.name in ("int4-g32", "int8-g32")) == kept
            for bank, linear, expected in (
                (ffn.up, first, torch.cat([gate[expert], up[expert]])),
                (ffn.down, last, down[expert]),
            ):
                own = linear.product.packed.dequantized() if bank.matrices is None else bank.matrices[expert]
                assert torch.equal(own, expected.float()), expert


@pytest.mark.parametrize(
    ("case", "keys", "said"),
    [
        ("qwen3_moe", {"expert_feed_forward_length": None}, "qwen3moe.expert_feed_forward_length is missing"),
        ("qwen3_moe", {"expert_count": 7}, "config.json implies 7 experts in its first"),
        ("qwen3_moe", {"expert_used_count": 9}, "it comes from the key qwen3moe.expert_used_count"),
        ("qwen3_moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func = 2 is not supported; only 1 is"),
        ("qwen3_moe", {"expert_weights_norm": False}, "qwen3moe.expert_weights_norm = False is not supported"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale = 2.5 is not supported"),
        ("qwen3_moe", {"expert_shared_count": 1}, "qwen3moe.expert_shared_count = 1 is not supported; only 0 is"),
        ("qwen3_moe", {"leading_dense_block_count": 1}, "qwen3moe.leading_dense_block_count = 1 is not supported"),
        ("mixtral", {"expert_used_count": None}, "llama.expert_used_count is missing"),
        ("mixtral", {"expert_used_count": 6}, "it comes from the key llama.expert_used_count"),
        ("mixtral", {"expert_count": 0}, "config.json implies 0 experts"),
        ("mixtral", {"expert_gating_func": 2}, "llama.expert_gating_func = 2 is not supported; only 1 is"),
        ("qwen2_moe", {"expert_shared_feed_forward_length": None}, "expert_shared_feed_forward_length is missing"),
        ("qwen2_moe", {"expert_weights_norm": True}, "qwen2moe.expert_weights_norm = True is not supported"),
        ("qwen2_moe", {"blk__0__ffn_down_shexp__weight": None}, "model.layers.0.mlp.shared_expert.down_proj.weight"),
        ("gemma2", {"attention__sliding_window_pattern": 4}, "gemma2.attention.sliding_window_pattern = 4 is not"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "it comes from the key gemma2.final_logit_softcapping"),
        ("phi3-long", {"rope_factors_long__weight": None}, "the tensor rope_factors_long.weight is missing"),
        ("phi3-long", {"rope_factors_short__weight": np.zeros(8, np.float32)}, "rope_factors_short.weight holds 0.0"),
        ("phi3-long", {"rope_factors_long__weight": np.ones(4, np.float32)}, "rope_factors_long.weight is F32 of"),
        ("phi3-long", {"rope__scaling__type": "yarn"}, "rope_factors_long.weight and rope scaling of type 'yarn'"),
        ("phi3-long", {"rope__scaling__attn_factor": 0.0}, "attention_factor = 0.0"),
        ("phi3-partial", {"rope__dimension_count": 17}, "phi3.rope.dimension_count = 17 must be from 1 to 16"),
        ("phi3-partial", {"rope__dimension_count": 11}, "rotates 11 of head_dim = 16 dimensions"),
        ("phi3", {"blk__0__attn_qkv__weight": np.ones((64, 64), np.float32)}, "config.json implies 128 rows"),
        ("olmo2", {"attention__sliding_window": 9}, "olmo2.attention.sliding_window = 9 is not supported; only 0 is"),
        ("olmoe", {"attention__clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv = 8.0 is not supported; only 0.0 is"),
        ("granite", {"logit_scale": None}, "granite.logit_scale is missing"),
        ("granite", {"rope__scaling__finetuned": False}, "granite.rope.scaling.finetuned = False is not supported"),
        ("granitemoe", {"expert_shared_feed_forward_length": 48}, "expert_shared_feed_forward_length = 48 is not"),
        ("glm4_moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func = 1 is not supported; only 2 is"),
        ("glm4_moe", {"nextn_predict_layers": 3}, "it comes from the key glm4moe.block_count"),
        ("glm4_moe", {"expert_group_count": 4}, "glm4moe.expert_group_count = 4 is not supported; only 0 is"),
        ("glm4_moe", {"blk__1__exp_probs_b__bias": None}, "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("glm4", {"nextn_predict_layers": 1}, "glm4.nextn_predict_layers = 1 is not supported; only 0 is"),
        ("gemma3", {"attention__sliding_window": None}, "gemma3.attention.sliding_window is missing"),
        ("gemma3", {"attention__sliding_window_pattern": 2}, "gemma3.attention.sliding_window_pattern = 2 is not"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping = 50.0 is not supported"),
        ("gemma3", {"rope__freq_base_swa": 0.5}, "it comes from the key gemma3.rope.freq_base_swa"),
        ("gemma3", {"blk__1__post_ffw_norm__weight": None}, "model.layers.1.ffn_post_norm.weight"),
        ("qwen3_moe", {"blk__1__ffn_up_exps__weight": None}, "model.layers.1.mlp.experts.0.up_proj.weight"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(
    case: str, keys: dict[str, Any], said: str, tmp_path: pathlib.Path, tools: Tools
) -> None:
    _, path = made(case, tmp_path, **keys)
    with pytest.raises(LoadError) as caught:
        tools["load"](path)
    assert said in caught.value.message, caught.value.message
