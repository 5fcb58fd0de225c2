"""Norms with their parameters, for products that take them in (`Linear`) or on their own."""

from __future__ import annotations

import torch

from quire.compute.layers.linear import Linear, Make
from quire.config.layers import NormKind
from quire.config.parameters import NormTable
from quire.kernels import gemm
from quire.kernels.norm import layer_norm, rms_norm


class Norm:
    """A norm over the last dimension; several vectors a row where its table has two dimensions."""

    def __init__(self, make: Make, table: NormTable) -> None:
        self.table = table
        self.eps = table.spec.eps
        self.weight = make(*table.shape) if table.spec.weight else None
        self.bias = make(*table.shape) if table.spec.bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, size], or [n, heads, size] for a weight of each head → a new tensor like it."""
        if self.table.spec.kind is NormKind.LAYER:
            return layer_norm(x, self.weight, self.bias, self.eps)
        assert self.weight is not None
        return rms_norm(x, self.weight, self.eps)

    @property
    def pair(self) -> gemm.Norm | None:
        """(weight [size], eps) if a product can take this norm in, as `Linear` takes it."""
        if self.table.spec.kind is not NormKind.RMS or self.weight is None:
            return None
        return self.weight, self.eps

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its parameters."""
        return [tensor for tensor in (self.weight, self.bias) if tensor is not None]

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; a norm has as many parts as its table has names."""
        kinds = {"weight": self.weight, "bias": self.bias}
        found = {kind: tensor for kind, tensor in kinds.items() if tensor is not None}
        return {kind: tensor[index] for kind, tensor in found.items()} if self.table.is_apart else found


def project(linear: Linear, x: torch.Tensor, norm: Norm | None, *, silu_mul: bool = False) -> torch.Tensor:
    """The product of the normed rows; the norm is part of it where it can be."""
    if norm is None:
        return linear(x, silu_mul=silu_mul)
    if norm.pair is None:
        return linear(norm(x), silu_mul=silu_mul)
    return linear(x, norm=norm.pair, silu_mul=silu_mul)
