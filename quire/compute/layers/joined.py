"""Matrices that read the same rows and lie under one another in one tensor, so that one product multiplies by all.

Owns where they lie. Does not own what they are. Invariant: each is filled, cut and counted as if it were alone, and can
be multiplied by alone, as where adapters add to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from quire.compute.layers.linear import Linear, Make
from quire.compute.schemes.choice import Schemes
from quire.compute.schemes.packed import Scheme
from quire.compute.schemes.plain import Plain
from quire.config.parameters import Matrix
from quire.kernels import gemm


class Joined:
    """Some matrices [n_i, k] as one [sum n_i, k]."""

    def __init__(self, make: Make, matrices: Sequence[Matrix], scheme: Scheme) -> None:
        self.weight = make(sum(matrix.n_out for matrix in matrices), matrices[0].n_in)
        self.linears: list[JoinedLinear] = []
        start = 0
        for matrix in matrices:
            self.linears.append(JoinedLinear(self, slice(start, start + matrix.n_out), matrix, scheme))
            start += matrix.n_out

    @property
    def are_bare(self) -> bool:
        """Nothing is around their products."""
        return all(linear.run is linear.product for linear in self.linears)

    def __call__(self, x: torch.Tensor, norm: gemm.Norm | None) -> list[torch.Tensor]:
        """x: [n, k] → of each [n, n_i], views of one tensor."""
        y = gemm.linear(x, self.weight, None, norm=norm)
        return [y[:, linear.rows] for linear in self.linears]

    def kernel(self, *, norm: bool) -> gemm.LinearShape:
        """See `Linear`."""
        n, k = self.weight.shape
        return gemm.LinearShape(n, k, norm)


class JoinedLinear(Linear):
    """One of them: a view to be filled, which is let go then."""

    def __init__(self, joined: Joined, rows: slice, matrix: Matrix, scheme: Scheme) -> None:
        self.joined, self.rows = joined, rows
        super().__init__(lambda *_: joined.weight[rows], matrix, scheme)

    def finish(self) -> None:
        """See `Linear`."""
        self.weight = None
        self.run = self.product = JoinedProduct(self.joined, self.rows)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The one tensor, by the first."""
        if self.rows.start == 0:
            yield self.joined.weight

    @property
    def plain_shapes(self) -> set[tuple[int, int]]:
        """See `Linear`: alone, and all of them."""
        n, k = self.joined.weight.shape
        return {(self.matrix.n_out, k), (n, k)}


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedProduct:
    """`gemm.linear` on some rows of the one tensor, which may be moved."""

    joined: Joined
    rows: slice

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Product`."""
        return {"weight": self.joined.weight[self.rows]}

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: gemm.Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product`."""
        weight = self.joined.weight[self.rows]
        return gemm.linear(x, weight, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)


def joined(make: Make, matrices: Sequence[Matrix], schemes: Schemes) -> Joined | None:
    """None where they are not all floating, in rows as they are and without a bias."""
    found = {schemes.of(matrix) for matrix in matrices}
    scheme = found.pop()
    if found or type(scheme) is not Plain or any(matrix.bias for matrix in matrices):
        return None
    return Joined(make, matrices, scheme)
