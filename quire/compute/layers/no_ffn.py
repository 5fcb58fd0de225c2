"""No feed-forward: what a layer without one has in its place. Owns nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quire.compute.layers.linear import Linear, Table
from quire.compute.layers.norm import Norm
from quire.compute.layers.residual import ResidualSum
from quire.kernels import gemm


class NoFfn:
    """See `Ffn`."""

    is_plain = False
    linears: tuple[Linear, ...] = ()
    adaptable: tuple[Linear, ...] = ()
    tables: tuple[Table, ...] = ()

    def __init__(self, *given: Any) -> None:
        self.sum = ResidualSum(None, 1.0)

    def take(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `Ffn`."""
        return x

    def add(self, taken: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Ffn`: nothing."""
        return x

    def record(self, *given: Any) -> None:
        """See `Ffn`: nothing."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Ffn`."""
        return iter(())

    def build(self, max_rows: int) -> None:
        """See `Ffn`: nothing."""

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Ffn`."""
        return []
