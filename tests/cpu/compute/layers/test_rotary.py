"""The cos/sin tables equal those of transformers bit for bit, for every scaling type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from quire.compute.layers.rotary import rope_table
from quire.config.model import parse_arch

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-attention": {**YARN, "attention_factor": 1.25},
}


def tables(rope: dict[str, Any], head_dim: int, n_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, theirs) for a model of 4,096 tokens."""
    config = modeling_llama.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 5e5, **rope},
    )
    arch = parse_arch({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    positions = torch.arange(n_positions)[None]
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    theirs = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    return rope_table(arch.ropes[0], head_dim, n_positions), theirs


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("name", TYPES)
def test_equal_to_transformers(name: str, head_dim: int) -> None:
    ours, theirs = tables(TYPES[name], head_dim, 4096)
    assert ours.dtype == torch.float32 and ours.shape == (4096, head_dim)
    assert torch.equal(ours, theirs)


def test_types_differ() -> None:
    """The inverse: no two types above give the same table, so none is silently the default."""
    found = [tables(rope, 32, 4096)[0] for rope in TYPES.values() if rope["rope_type"] != "dynamic"]
    for i, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[i + 1 :])


def test_dynamic_depends_on_the_table_length_only_beyond_the_original() -> None:
    rope = TYPES["dynamic"]
    within, full, beyond = (tables(rope, 32, n)[0] for n in (1000, 4096, 8192))
    assert torch.equal(within, full[:1000])
    assert not torch.equal(full, beyond[:4096])
    assert torch.equal(*tables(rope, 32, 8192))
