"""Why a model's steps are not native calls, as its user is told."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import transformers
from family_cases import CASES, TINY

from quire.compute.forward import obstacle as obstacles
from quire.compute.forward.obstacle import obstacle
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.schemes.choice import choose
from quire.config.model import read_arch

CPU = torch.device("cpu")
LACKING = {
    "deepseek_v2": "latent attention, no router in float32",
    "falcon-alibi": "LayerNorm, no ALiBi, no plain gelu feed-forward",
    "gemma": "scaled embeddings, no gated gelu_tanh feed-forward",
    "gemma2": "scaled embeddings, no norms both before and behind attention and feed-forward, no soft cap on "
    "attention, no soft cap on logits",
    "glm": "",
    "gpt2": "learned positions, no LayerNorm, no plain gelu_tanh feed-forward",
    "gpt_oss": "sinks in attention, no experts without SwiGLU",
    "granite": "scaled embeddings, no scaled residual stream, no scaled logits",
    "lfm2": "short convolution layers",
    "mamba2": "residual stream in float32, no Mamba-2 layers",
    "olmo-clip": "LayerNorm, no cut of queries, keys and values",
    "olmo2": "norms behind attention and feed-forward",
    "phi-qk-norm": "attention and feed-forward side by side, no LayerNorm, no such norms of queries and keys, no plain "
    "gelu_tanh feed-forward",
    "qwen2_moe": "gated shared expert",
    "qwen3_moe": "",
    "qwen3_next-dense": "gated DeltaNet layers, no gated attention",
}


def model_of(case: str, folder: pathlib.Path, quantization: str = "none") -> Decoder:
    family, fields = CASES[case]
    of_text = f"{family}TextConfig"
    kind = getattr(transformers, of_text if hasattr(transformers, of_text) else f"{family}Config")
    name = f"{family}{'ForCausalLM' if hasattr(transformers, family + 'ForCausalLM') else 'LMHeadModel'}"
    config = json.loads(kind(**{**TINY, **fields}).to_json_string()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    model = decoder_on(CPU, read_arch(folder), torch.bfloat16, 256, choose(quantization, CPU, torch.bfloat16))
    model.finish()
    return model


@pytest.mark.parametrize("case", LACKING)
def test_what_a_native_step_lacks_is_named(case: str, tmp_path: pathlib.Path) -> None:
    said = LACKING[case]
    assert obstacle(model_of(case, tmp_path)) == (f"the native step knows no {said}" if said else None)


def test_absent_kernels_are_told_before_what_follows_from_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them no matrix is packed, which says nothing to anybody."""
    model = model_of("gpt2", tmp_path)
    monkeypatch.setattr(obstacles.native, "library", lambda: None)
    monkeypatch.setattr(obstacles.native, "explain", lambda: "Native CPU kernels are off (QUIRE_NATIVE=0).")
    assert obstacle(model) == "Native CPU kernels are off (QUIRE_NATIVE=0)"
