"""Matrices as they are: rows of the model's dtype, for torch's products and the GPU's; or as oneDNN orders them.

Invariant of oneDNN in float32 and bfloat16: a row of the result has the same bits whatever the other rows and their
number are, so a request's tokens do not depend on its batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.schemes.scheme import MatrixScheme, Product, Stored
from quire.kernels import around, gemm
from quire.kernels.gemm import Norm
from quire.kernels.norm import rms_norm

MIN_ROWS: Final = 4
"""Fewer rows than this are filled up with zeros before a product of oneDNN."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlainProduct:
    """`gemm.linear` on the matrix."""

    weight: torch.Tensor

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
        return gemm.linear(x, self.weight, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


@dataclasses.dataclass(frozen=True, slots=True)
class OneDnnProduct:
    """oneDNN's product, and what stands around it one after another."""

    weight: torch.Tensor
    """[n, k], in an order that only oneDNN knows."""

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
        if norm is not None:
            x = rms_norm(x, *norm)
        # oneDNN sums one row in another order than two or more, and reads a large matrix faster for four rows than one.
        n_rows = len(x)
        if 0 < n_rows < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - n_rows))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return around.finish(y[:n_rows], residual, silu_mul, out)


@dataclasses.dataclass(frozen=True)
class Plain(MatrixScheme):
    """The floating matrix."""

    dtype: torch.dtype
    keeps_matrix = True

    @property
    def name(self) -> str:
        """The dtype's."""
        return str(self.dtype).removeprefix("torch.")

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """See `WeightScheme`."""
        return (Stored("weight", (n, k), self.dtype),)

    def finish(self, weight: torch.Tensor) -> Product:
        """See `MatrixScheme`."""
        return PlainProduct(weight)


@dataclasses.dataclass(frozen=True)
class OneDnn(Plain):
    """The same numbers in oneDNN's order, on a CPU without the native kernels."""

    keeps_matrix = False

    def finish(self, weight: torch.Tensor) -> Product:
        """See `MatrixScheme`."""
        return OneDnnProduct(torch.ops.mkldnn._reorder_linear_weight(weight, None))


@functools.cache
def can_reorder(device_type: str, dtype: torch.dtype) -> bool:
    """Whether matrices are ordered for oneDNN. False on a GPU, without it, and for types without a fast kernel here.

    Others go through `F.linear`. For float32 that is MKL, whose sums depend on the number of rows.
    """
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
