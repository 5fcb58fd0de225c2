"""Shapes of real models for the tests of this folder."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tie_embeddings: bool


LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14336, 128256, False)
QWEN_600M = Shape(28, 1024, 16, 8, 128, 3072, 151936, True)
