"""Small random checkpoints, written by transformers, whose outputs depend on the whole context."""

from __future__ import annotations

import pathlib
from typing import Any, Final

import torch
import transformers

FAMILIES: Final = ("Llama", "Qwen2", "Qwen3", "Mistral")
MAX_POSITION: Final = 2048
WINDOW: Final = 96
"""Sliding window of the Mistral checkpoint: shorter than its prompts, no multiple of 64."""
SMALL: Final[dict[str, Any]] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""For a CPU."""
WIDE: Final[dict[str, Any]] = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
"""For a GPU: heads of 64, which its attention kernels have builds for."""


def write_checkpoint(
    folder: pathlib.Path, family: str, shape: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> transformers.PreTrainedModel:
    """Write a checkpoint in `dtype`; returns transformers' model of the same weights in float32, on the CPU.

    Weights are normal with variance 1.4 / width, so that attention moves the residual stream and logits spread by
    several units: a token computed from wrong keys is then rarely near the largest logit.
    """
    fields = {"max_position_embeddings": MAX_POSITION, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    if family == "Mistral":
        fields["sliding_window"] = WINDOW
    if family == "Qwen2":  # the first layer keeps everything
        fields |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    if family == "Qwen3":
        fields["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    config = getattr(transformers, f"{family}Config")(**shape, **fields)
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, deviation = (1.0, 0.2) if "norm" in name else (0.0, (1.4 / shape["hidden_size"]) ** 0.5)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return model.float()
