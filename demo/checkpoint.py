"""Owns the model files in the Hugging Face layout: writing them in bf16, and reading them back for measurement."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .chat import END_OF_TEXT, TURN_END
from .model import Llama, Shape

FIELDS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}


def described(shape: Shape) -> dict[str, Any]:
    """What the config.json of a model of such layers says of them."""
    return {
        "model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        **{name: getattr(shape, field) for field, name in FIELDS.items()},
    }  # fmt: skip


def save(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    config: dict[str, Any] = {
        **described(model.shape),
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": turn_end,
        "pad_token_id": end,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "use_cache": True,
    }
    generation = {"do_sample": False, "eos_token_id": [turn_end, end], "pad_token_id": end}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    path = folder / "model.safetensors"
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)


def load(folder: Path) -> Llama:
    """The model as stored (weights rounded to bf16), in float32."""
    config = json.loads((folder / "config.json").read_text())
    model = Llama(Shape(**{field.name: config[FIELDS[field.name]] for field in fields(Shape)}))
    tensors = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model
