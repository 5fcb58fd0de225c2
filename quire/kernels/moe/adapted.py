"""Experts of which rows have adapters: small matrices of each adapter, of each expert, added to both of its products.

Owns their layout, and the public call. Does not own which rows have which (`compute/adapters`).
"""

from __future__ import annotations

import dataclasses

import torch

from quire.config.experts import Gating
from quire.kernels import lora
from quire.kernels.moe.coded import Matrices
from quire.kernels.moe.op import SWIGLU, experts_arguments
from quire.kernels.selector import select


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Of E experts: number `place * E + expert` of both stacks is what the adapter in a place has for an expert."""

    up: lora.Stack
    """Of [2 * inner, hidden], its parts the gate and up."""
    down: lora.Stack
    """Of [hidden, inner]."""
    places: torch.Tensor
    """int32 [n]: of the adapter of each row, -1: none."""

    def keys(self, expert_ids: torch.Tensor, n_experts: int) -> torch.Tensor:
        """[n, k] int32: the number in the stacks, of each row and expert that it chose; -1: nothing is added."""
        keys = self.places[:, None] * n_experts + expert_ids
        return keys.masked_fill((self.places[:, None] < 0) | (expert_ids < 0), -1)


def adapted_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    adapters: ExpertAdapters,
    *,
    gating: Gating = SWIGLU,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `experts` computes, of matrices up[e] + B_up A_up and down[e] + B_down A_down of the row's adapter and the
    expert e. Arguments as there; as there, nothing is read by the host. What is added is rounded to x's dtype.

    Raises ValueError on a mismatch.
    """
    arguments = experts_arguments(x, expert_ids, weights, up, down, gating, up_bias, down_bias, residual, None)[:-1]
    n_experts, n_groups = down.shape[0], len(adapters.up.a)
    if n_groups % n_experts or len(adapters.down.a) != n_groups:
        raise ValueError(f"{n_groups} and {len(adapters.down.a)} adapters are not of {n_experts} experts")
    for name, stack, matrices in (("up", adapters.up, up), ("down", adapters.down, down)):
        if (sum(stack.sizes), stack.a.shape[2]) != tuple(matrices.shape[1:]):
            raise ValueError(f"adapters of {name} [{sum(stack.sizes)}, {stack.a.shape[2]}] do not fit {matrices.shape}")
    if adapters.places.shape != (len(x),) or adapters.places.dtype != torch.int32:
        raise ValueError(f"places {tuple(adapters.places.shape)} {adapters.places.dtype} must be [{len(x)}] int32")
    given = (*arguments[:5], adapters, *arguments[5:])
    y: torch.Tensor = select("moe", "adapted_experts", *given)(*given)
    return y
