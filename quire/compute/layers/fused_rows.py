"""Memory of a fused step's rows (`kernels/fused_step`), which its operations hand on from one to the next.

Owns what there is of it. Does not own the data flow (`decoder_layer`, and what it is made of).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from quire.config.experts import ExpertsSpec
from quire.config.layers import LayerSpec


class Zeros(Protocol):
    """`Device.zeros`."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertRows:
    """What a mixture of experts needs, each [max_rows, ...]."""

    normed: torch.Tensor
    """[.., hidden]: what router and experts read."""
    logits: torch.Tensor
    """[.., n_experts] float32."""
    expert_ids: torch.Tensor
    """[.., n_chosen] int32."""
    weights: torch.Tensor
    """[.., n_chosen] float32."""
    shared: torch.Tensor
    """[.., size]: the inner vector of the expert that every token goes through."""
    scratch: torch.Tensor
    """Numbers, for each chosen expert of a row its input or output and its inner vector."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRows:
    """Memory of a layer, each [max_rows, ...]; layers take turns."""

    x: torch.Tensor
    """[.., hidden]: the residual stream."""
    qkv: torch.Tensor
    y: torch.Tensor
    """[.., q size]: what attention gives."""
    inner: torch.Tensor
    """[.., ffn size]."""
    pages: Mapping[int, tuple[tuple[torch.Tensor, torch.Tensor], int]]
    """Of each layer its pages of keys and of values, and their group."""
    experts: Mapping[ExpertsSpec, ExpertRows]
    """Of each kind of experts."""


def expert_rows(
    layers: Iterable[LayerSpec], hidden_size: int, max_rows: int, dtype: torch.dtype, zeros: Zeros
) -> dict[ExpertsSpec, ExpertRows]:
    """For all kinds that there are; they share what does not depend on the kind."""
    kinds = [ffn for ffn in {spec.ffn: None for spec in layers} if isinstance(ffn, ExpertsSpec)]
    if not kinds:
        return {}
    normed = zeros((max_rows, hidden_size), dtype)
    most = max(spec.routing.n_chosen * (hidden_size + spec.size) for spec in kinds)
    scratch = zeros((max_rows * most,), dtype)
    return {
        spec: ExpertRows(
            normed,
            zeros((max_rows, spec.n_experts), torch.float32),
            zeros((max_rows, spec.routing.n_chosen), torch.int32),
            zeros((max_rows, spec.routing.n_chosen), torch.float32),
            zeros((max_rows, 0 if spec.shared is None else spec.shared.size), dtype),
            scratch,
        )
        for spec in kinds
    }
