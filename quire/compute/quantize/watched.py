"""Matrices that tell what goes into them: the scheme with which layers are built to be calibrated.

Owns the statistics of inputs. Does not own which pieces of text they are of (`session`).
Invariant: the product is that of the floating matrix, which stays where it is and may be changed between products.
"""

from __future__ import annotations

import dataclasses

import torch

from quire.compute.layers.linear import Linear
from quire.compute.schemes.choice import Schemes
from quire.compute.schemes.plain import Plain, PlainProduct
from quire.config.parameters import Kept
from quire.kernels.gemm import Norm
from quire.kernels.norm import rms_norm


class Statistics:
    """Of all rows x that a matrix has multiplied."""

    def __init__(self, n_inputs: int, device: torch.device) -> None:
        self.n_rows = 0
        self.hessian = torch.zeros(n_inputs, n_inputs, device=device)
        """X^T X, float32."""
        self._sums = torch.zeros(n_inputs, device=device)

    def add(self, x: torch.Tensor) -> None:
        """x: [n, n_inputs] of any floating type."""
        wide = x.float()
        self.n_rows += len(x)
        self.hessian.addmm_(wide.T, wide)
        self._sums += wide.abs().sum(0)

    @property
    def magnitudes(self) -> torch.Tensor:
        """[n_inputs]: mean |x|."""
        return self._sums / max(1, self.n_rows)

    def scale(self, factors: torch.Tensor) -> None:
        """Inputs are these times as large from now on, and were."""
        self.hessian.mul_(factors[:, None]).mul_(factors)
        self._sums.mul_(factors)


@dataclasses.dataclass(slots=True)
class WatchedProduct:
    """`PlainProduct` that shows its inputs, behind the norm, to `seen`."""

    weight: torch.Tensor
    seen: Statistics | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Product`."""
        return {"weight": self.weight}

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product`."""
        if self.seen is not None:
            self.seen.add(x if norm is None else rms_norm(x, *norm))
        return PlainProduct(self.weight)(x, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


@dataclasses.dataclass(frozen=True)
class Watched(Plain):
    """The floating matrix, whose product watches."""

    def finish(self, weight: torch.Tensor) -> WatchedProduct:
        """See `MatrixScheme`."""
        return WatchedProduct(weight)


def watched_schemes(dtype: torch.dtype) -> Schemes:
    """Of all matrices of a model of `dtype`."""
    one = Watched(dtype)
    return Schemes(one, exact={Kept.FLOATING: one, Kept.FLOAT32: Watched(torch.float32)})


def product_of(linear: Linear) -> WatchedProduct:
    """Of a layer that was built with `watched_schemes` and is finished."""
    assert isinstance(linear.product, WatchedProduct)
    return linear.product


def matrix_of(linear: Linear) -> torch.Tensor:
    """[n_out, n_in], to be changed in place."""
    return product_of(linear).weight
