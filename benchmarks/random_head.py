"""A random EAGLE-3 head for a bundled shape, as published ones are stored: for the speed of guesses, as its are wrong.

    python -m benchmarks.random_head shape:llama-3.1-8b head
    quire bench speculate shape:llama-3.1-8b --device cuda --acceptance 0.8 --batch-sizes 1 8 32 128 \
        --speculative-config '{"method": "eagle3", "model": "head", "num_speculative_tokens": 6}'
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any, Final

import torch
from safetensors.torch import save_file

from quire.bench.shape import shape_options
from quire.config.eagle import parse_head
from quire.core.files import new_file_mode

LEFT_OUT: Final = ("architectures", "bos_token_id", "eos_token_id", "tie_word_embeddings", "initializer_range")
SPREAD: Final = 0.02


def config_of(model: str, n_ids: int) -> dict[str, Any]:
    """A layer of Llama's kind, as all published heads are, with the shape's own widths, and so many ids."""
    text = (pathlib.Path(str(shape_options(model)["model"])) / "config.json").read_text()
    config: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name not in LEFT_OUT}
    config |= {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": n_ids}
    parse_head(config, f"the head for {model}")
    return config


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """bfloat16, normal; norms are ones, and the ids are spread evenly over the model's."""
    hidden, inner, n_ids = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    d = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (n_ids, hidden), "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden), "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q), "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden), "midlayer.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = "norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"
    made = {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    for name, shape in shapes.items():
        made[f"{name}.weight"] = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, SPREAD)
    ids = torch.arange(n_ids) * (config["vocab_size"] // n_ids)
    return made | {"d2t": ids - torch.arange(n_ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random EAGLE-3 head for a bundled shape.")
    parser.add_argument("model", help="shape:NAME")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ids", type=int, default=32000, help="of its own vocabulary")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = config_of(args.model, args.ids)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = tensors_of(config)
    save_file(tensors, str(args.folder / "model.safetensors"))
    (args.folder / "model.safetensors").chmod(new_file_mode())
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    print(f"{args.folder}: {n_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
