"""The numbers of a dense decoder that memory and time follow from. Owns counting of weights and K/V; no units of time.

Biases, norm weights and rotary tables are left out of FLOPs; norms are counted in memory. All are below 0.1 %.
"""

from __future__ import annotations

from typing import Protocol


class Shape(Protocol):
    """What the planner reads of `config.arch.ModelArch`."""

    @property
    def n_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


def layer_weights(shape: Shape) -> int:
    """Weights of one layer's matrices: q, k, v, o and the three of a gated MLP."""
    attention = 2 * (shape.n_heads + shape.n_kv_heads) * shape.head_dim * shape.hidden_size
    return attention + 3 * shape.hidden_size * shape.ffn_size


def head_weights(shape: Shape) -> int:
    """Weights of the output head (or of the embedding, which has the same size)."""
    return shape.vocab_size * shape.hidden_size


def n_weights(shape: Shape) -> int:
    """All weights that a checkpoint holds, biases and qk-norms left out."""
    norms = (2 * shape.n_layers + 1) * shape.hidden_size
    return shape.n_layers * layer_weights(shape) + norms + head_weights(shape) * (1 if shape.tie_embeddings else 2)


def kv_numbers_per_token(shape: Shape) -> int:
    """Numbers in the K/V of one token, all layers."""
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim
