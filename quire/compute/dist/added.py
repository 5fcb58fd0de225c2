"""The sum over ranks added to the residual stream, and its norm: in one launch where a `Comm` has one.

Owns what it is made of where there is none. Does not own where in a layer it stands (`layers/residual.py`).
"""

from __future__ import annotations

import torch

from quire.compute.dist.comm import Comm
from quire.kernels import gemm
from quire.kernels.gemm import Norm
from quire.kernels.norm import rms_norm


class RankSum:
    """What the ranks' terms of a row-parallel product come to."""

    def __init__(self, comm: Comm) -> None:
        self.all_reduce, self.size = comm.all_reduce, comm.size
        self._comm = comm
        self._own = getattr(comm, "add_reduced", None)
        """A comm's own launch for `add`, if it has one."""
        self._own_product = getattr(comm, "add_product", None)
        """And its own way for `add_product`."""

    @property
    def sends_to(self) -> int:
        """Ranks to which products send their terms themselves; 0: they do not."""
        n_ranks: int = getattr(self._comm, "sends_to", 0)
        return n_ranks

    def add_product(
        self,
        y: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        norm: Norm | None = None,
    ) -> torch.Tensor | None:
        """As `add` of the term y [n, k] @ w [h, k]^T + bias, whose way to other ranks may be hidden in the product."""
        if self._own_product is None:
            return self.add(gemm.linear(y, w, bias), x, norm)
        normed: torch.Tensor | None = self._own_product(y, w, bias, x, norm)
        return normed

    def add(self, z: torch.Tensor, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor | None:
        """z: this rank's term [n, h], which may be overwritten; x: the stream [n, h], the same on all ranks, takes the
        sum in place. norm: (weight [h], eps) → the rows of x normed, else None."""
        if self._own is None:
            return reduced_then_added(self._comm, z, x, norm)
        normed: torch.Tensor | None = self._own(z, x, norm)
        return normed


def reduced_then_added(comm: Comm, z: torch.Tensor, x: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
    """See `RankSum.add`; one after another."""
    x.add_(comm.all_reduce(z))
    return None if norm is None else rms_norm(x, *norm)
