"""A folder with a tiny model whose tokens are bytes, and more logits than tokens, as real checkpoints have."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import tokenizers

N_LOGITS = 384


def make_tokenizer(folder: pathlib.Path, marks: Sequence[str] = ()) -> None:
    """Of 257 tokens. marks: control tokens besides."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {symbol: i + 1 for i, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", *marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def make(folder: pathlib.Path) -> pathlib.Path:
    """Configuration and tokenizer; weights are random (`load_format="dummy"`)."""
    make_tokenizer(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
        "vocab_size": N_LOGITS, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 0,
        "attention_bias": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
