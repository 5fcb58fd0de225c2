"""Weight schemes: what the matrices of a model become once they are loaded.

Owns which matrices a scheme changes and to what. Does not own number formats (`kernels/qgemm`) nor when a matrix is
complete (`weights/loader`). Embeddings and norms are never quantised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch

from quire.core.errors import LoadError
from quire.kernels import qgemm
from quire.kernels.gemm import Norm


class Product(Protocol):
    """A matrix [n, k] ready for products."""

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        ...

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
        """x: [m, k], bias: [n] in x's dtype → x @ matrix.T + bias and what stands around it, as `gemm.linear`."""
        ...


Quantize = Callable[[torch.Tensor], Product]
"""Takes a floating matrix [n, k], which is not needed afterwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedProduct:
    """The CPU's kernels on a packed matrix. A row's bits do not depend on the others.

    With weights of 8 or 4 bits activations are rounded to 8 bits in the call.
    """

    packed: qgemm.PackedWeight

    @property
    def n_bytes(self) -> int:
        """Weights and scales."""
        return self.packed.n_bytes

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
        return qgemm.linear(x, self.packed, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """Every matrix, the output head too, rounded by the scheme of this name in `kernels/qgemm`."""

    name: str
    """Value of `--quantization`."""

    def product(self, weight: torch.Tensor) -> Product:
        """The product of a matrix. A tied head gets its own copy here; the embedding stays as it is."""
        return PackedProduct(pack(weight, self.name))


SCHEMES: Final[Mapping[str, Rounded | None]] = {
    "auto": None,
    "none": None,
    **{name: Rounded(name) for name in qgemm.SCHEMES},
}
"""Value of `--quantization` → scheme; None rounds nothing: matrices are in the model's dtype, except those that 'auto'
takes from a GGUF file as they are (`weights/gguf_exact`)."""


def pack(weight: torch.Tensor, scheme: str) -> qgemm.PackedWeight:
    """`qgemm.pack(weight, scheme)`; LoadError if the matrix cannot be packed."""
    try:
        return qgemm.pack(weight, scheme)
    except ValueError as error:
        raise LoadError(f"a matrix cannot be quantised: {error}; run without --quantization") from None
