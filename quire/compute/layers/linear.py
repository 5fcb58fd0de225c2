"""Linear layers: one matrix product for several projections that read the same input.

Owns the parameters, their split into the checkpoint's parts, and on CPU their layout. Does not own their names, nor
what quantised weights are (`compute/quant`).
Invariant on CPU, with the native kernels, or with oneDNN in float32 and bfloat16: a row of the result has the same bits
whatever the other rows and their number are, so a request's tokens do not depend on its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from quire.compute.quant import PackedProduct, Product, Quantize
from quire.config.parameters import Matrix
from quire.kernels import gemm, native, qgemm
from quire.kernels.act import silu_mul as silu_mul_op
from quire.kernels.gemm import Norm
from quire.kernels.norm import rms_norm

MIN_ROWS: Final = 4
"""Fewer rows than this are filled up with zeros before a packed product."""
Make = Callable[..., torch.Tensor]
"""`make(*shape)`: an uninitialised tensor of the model's dtype, where the model lives."""


class Linear:
    """y = x @ weight.T + bias, where the rows of `weight` are several projections under one another.

    Parameters are filled through `part`; then `pack` puts the matrix into the layout that products want.
    """

    def __init__(
        self,
        make: Make,
        matrix: Matrix,
        *,
        tied: torch.Tensor | None = None,
        quantize: Quantize | None = None,
    ) -> None:
        """tied: a matrix [n_out, n_in] owned by another layer, used instead of an own one.

        quantize: what `pack` does with the matrix; None keeps its dtype.
        """
        self.matrix = matrix
        self.is_tied = tied is not None
        self.quantize = quantize
        self.product: Product | None = None
        """Takes the place of `weight`, which is then empty."""
        self.weight = make(matrix.n_out, matrix.n_in) if tied is None else tied
        self.bias = make(matrix.n_out) if matrix.bias else None
        self.is_packed = False

    def __call__(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y with what stands around it, in as few launches as there are kernels for; arguments as in `gemm.linear`.

        x: [n, n_in], n >= 1, x's dtype → [n, n_out], half of that with silu_mul.
        """
        if self.product is not None:
            return self.product(x, self.bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)
        if not self.is_packed:
            return gemm.linear(x, self.weight, self.bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)
        if norm is not None:
            x = rms_norm(x, *norm)
        y = _packed_linear(x, self.weight, self.bias)
        if silu_mul:
            y = silu_mul_op(y)
        if residual is not None:
            return residual.add_(y)
        return y if out is None else out.copy_(y)

    def kernel(
        self, *, norm: bool = False, silu_mul: bool = False, residual: bool = False, wide: bool = False
    ) -> gemm.LinearShape:
        """What `gemm.build` needs to know, before packing; the arguments say what its calls have around the product."""
        n, k = self.weight.shape
        return gemm.LinearShape(n, k, norm, silu_mul, residual, self.bias is not None, wide)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """The parameters of projection `index`, by their kind in the checkpoint: contiguous views to copy into."""
        sizes = [rows for _, rows in self.matrix.parts]
        return {
            kind: tensor.split(sizes)[index]  # type: ignore[no-untyped-call]
            for kind, tensor in self.parameters().items()
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Those of all projections, by their kind."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def pack(self) -> None:
        """Quantise the matrix, else lay it out for the CPU's kernels, or without them for oneDNN (see `can_pack`).

        To be called when all parameters are in place; a second call does nothing. The floating matrix is let go (a
        tied one stays with its owner, and this layer has its own copy from now on).
        """
        if self.product is not None or self.is_packed:
            return
        if self.quantize is not None:
            self.product = self.quantize(self.weight)
            self.weight = self.weight.new_empty(0)
        elif self.weight.device.type == "cpu" and native.library() is not None and self.weight.dtype in native.DTYPES:
            self.product = PackedProduct(qgemm.pack_floats(self.weight))
            self.weight = self.weight.new_empty(0)
        elif can_pack(self.weight.device.type, self.weight.dtype):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
            self.is_packed = True

    def adopt(self, product: Product) -> None:
        """Take a product that is filled elsewhere, instead of the matrix; what is copied into its parts is lost."""
        self.product = product
        self.weight = self.weight.new_empty(0)

    @property
    def n_bytes(self) -> int:
        """Memory of the parameters, without those that another layer owns."""
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        if self.product is not None:
            return self.product.n_bytes + bias_bytes
        if self.is_tied and not self.is_packed:
            return bias_bytes
        return self.weight.numel() * self.weight.element_size() + bias_bytes


class Embedding:
    """A table of one row a token id, or a position."""

    def __init__(self, make: Make, name: str, n_rows: int, size: int) -> None:
        self.name = name
        self.weight = make(n_rows, size)

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """token_ids: [n] int32 or int64, each < n_rows → [n, size], written to `out` if given."""
        return torch.index_select(self.weight, 0, token_ids, out=out)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; a table has one part."""
        return {"weight": self.weight}


@functools.cache
def can_pack(device_type: str, dtype: torch.dtype) -> bool:
    """Whether matrices are packed for oneDNN. False on a GPU, without it, and for types it has no fast kernel for here.

    Unpacked products go through `F.linear`. For float32 that is MKL, whose sums depend on the number of rows.
    """
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # oneDNN sums one row in another order than two or more, and reads a large matrix faster for four rows than for one.
    n_rows = len(x)
    if 0 < n_rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - n_rows))
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y[:n_rows]
