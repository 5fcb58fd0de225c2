"""What a weight scheme says of a matrix [n, k]: the tensors it is stored as, how it is cut for a rank, its finishing.

Owns the protocols. Does not own number formats (`kernels/qgemm`), which matrix has which scheme (`choice`), nor when a
matrix is complete (`weights/loader`). Embeddings and norms have no scheme: they are of the model's dtype.
Invariant: the tensors of a finished product are those that its scheme declares, in names, shapes and dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import torch

from quire.compute.schemes.coded import Coded
from quire.config.parameters import Matrix
from quire.config.shares import Share, share
from quire.kernels.gemm import Norm
from quire.kernels.moe import CodedMatrices


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a finished matrix."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def zeros(self, device: torch.device, *of: int) -> torch.Tensor:
        """It, or `of` many of it in one tensor."""
        return torch.zeros(*of, *self.shape, dtype=self.dtype, device=device)


class Product(Protocol):
    """A matrix [n, k] ready for products."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it holds, by the names of `WeightScheme.stored`."""
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


class WeightScheme(Protocol):
    """One way to keep matrices. What classes of it do not say otherwise, they inherit."""

    @property
    def name(self) -> str:
        """In logs: a value of --quantization, or a dtype."""
        ...

    keeps_matrix: bool
    """What it stores is the floating matrix itself: one that somebody else owns costs nothing."""

    def stored(self, n: int, k: int) -> tuple[Stored, ...]:
        """The tensors of a finished matrix [n, k]."""
        ...

    def cut(self, matrix: Matrix, rank: int, n_ranks: int) -> Share:
        """What rank `rank` of `n_ranks` holds. Raises ConfigError where this scheme cannot cut there."""
        return share(matrix, rank, n_ranks)

    def n_bytes(self, n: int, k: int) -> int:
        """Memory of a finished matrix [n, k]."""
        return sum(tensor.n_bytes for tensor in self.stored(n, k))

    @property
    def makes_banks(self) -> bool:
        """Whether one call can multiply by matrices of many experts, each of `stored` in one tensor: see `bank`."""
        return False

    def bank_tensors(self, n_experts: int, n: int, k: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Name in `stored` → that of all experts, with them in front, of zeros."""
        return {one.name: one.zeros(device, n_experts) for one in self.stored(n, k)}

    def of_bank(self, tensors: dict[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
        """Views of the tensors of `bank_tensors` that are one expert's, as `stored` declares them."""
        return {name: tensor[expert] for name, tensor in tensors.items()}

    def bank(self, tensors: dict[str, torch.Tensor], k: int) -> CodedMatrices:
        """A matrix [n, k] of each expert, of what `bank_tensors` gave."""
        raise TypeError(f"{self.name} has a call for each matrix")


class MatrixScheme(WeightScheme, Protocol):
    """A scheme that makes what it stores of a floating matrix, when that is complete."""

    def finish(self, weight: torch.Tensor) -> Product:
        """weight: [n, k] floating, not needed afterwards unless it is kept. Raises ValueError if it cannot be."""
        ...


class FilledScheme(WeightScheme):
    """A scheme whose product is filled with what a file holds, part by part: there is no floating matrix."""

    def begin(self, n: int, k: int, device: torch.device) -> Product:
        """A product [n, k] on a device, to be filled."""
        return self.product({one.name: one.zeros(device) for one in self.stored(n, k)}, k)

    def product(self, tensors: dict[str, torch.Tensor], k: int) -> Product:
        """The product [n, k] of the tensors of `stored`, by their names, which may be filled later."""
        raise NotImplementedError

    def put(self, product: Product, first_row: int, coded: Coded) -> None:
        """Fill rows `first_row`, ... of a product that `begin` made. Raises ValueError where numbers do not fit."""
        raise NotImplementedError


class NibblesScheme(FilledScheme):
    """Codes of 4 bits, and `scales` [groups, n]: in a bank those of a row lie side by side."""

    def bank_tensors(self, n_experts: int, n: int, k: int, device: torch.device) -> dict[str, torch.Tensor]:
        """See `WeightScheme`."""
        found = super().bank_tensors(n_experts, n, k, device)
        return {**found, "scales": found["scales"].mT.contiguous()}

    def of_bank(self, tensors: dict[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
        """See `WeightScheme`."""
        found = super().of_bank(tensors, expert)
        return {**found, "scales": found["scales"].t()}
