"""One matrix of each expert: all in one tensor, floating or in codes, or each laid out by itself.

Owns where they lie, and how they are filled. Does not own which experts there are nor how they are chosen (`experts`).
Invariant: what is filled are views of the one tensor, which are let go once a matrix is finished.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from quire.compute.layers.linear import Linear, Make
from quire.compute.schemes.choice import Schemes
from quire.compute.schemes.packed import Scheme
from quire.compute.schemes.plain import Plain
from quire.compute.schemes.scheme import FilledScheme, Product
from quire.config.parameters import Matrix
from quire.kernels import moe
from quire.kernels.gemm import Norm as NormPair


class Bank:
    """A matrix of each expert, each laid out by itself."""

    matrices: moe.Matrices | None = None
    """All of them, where they are in one tensor and finished."""
    bias: torch.Tensor | None = None
    """[E, n_out] then."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears

    def tensors(self) -> Iterator[torch.Tensor]:
        """Beside those of the linears."""
        return iter(())

    def of_slot(self, slot: int) -> list[torch.Tensor]:
        """All that is stored of one expert, once it is finished; contiguous."""
        return list(self.linears[slot].tensors())


class Stack(Bank):
    """All in one tensor [E, n_out, n_in]."""

    def __init__(self, make: Make, matrices: list[Matrix], scheme: Plain) -> None:
        one = matrices[0]
        self.matrices = made = make(len(matrices), one.n_out, one.n_in)
        self.bias = _biases(make, matrices)
        slices = []
        for expert, matrix in enumerate(matrices):
            views = {2: made[expert], 1: None if self.bias is None else self.bias[expert]}
            slices.append(Slice(functools.partial(_view, views), matrix, scheme))
        super().__init__(slices)

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Bank`."""
        if isinstance(self.matrices, torch.Tensor):
            yield self.matrices
        if self.bias is not None:
            yield self.bias

    def of_slot(self, slot: int) -> list[torch.Tensor]:
        """See `Bank`."""
        return [one[slot] for one in self.tensors()]


class CodedStack(Bank):
    """Each tensor of a scheme for all of them in one. It is there once the first matrix is begun, or finished."""

    def __init__(self, make: Make, matrices: list[Matrix], scheme: Scheme) -> None:
        self.scheme, self.shape = scheme, (len(matrices), matrices[0].n_out, matrices[0].n_in)
        self.device = make(0).device
        self.bias = _biases(make, matrices)
        super().__init__([CodedSlice(self, expert, make, matrix) for expert, matrix in enumerate(matrices)])

    @functools.cached_property
    def stored(self) -> dict[str, torch.Tensor]:
        """By the names of the scheme's `stored`."""
        return self.scheme.bank_tensors(*self.shape, self.device)

    @functools.cached_property
    def matrices(self) -> moe.CodedMatrices:  # type: ignore[override]
        """See `Bank`."""
        return self.scheme.bank(self.stored, self.shape[2])

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Bank`."""
        yield from self.stored.values()
        if self.bias is not None:
            yield self.bias

    def of_slot(self, slot: int) -> list[torch.Tensor]:
        """See `Bank`."""
        return [one[slot] for one in self.tensors()]


class Slice(Linear):
    """An expert's matrix in a stack: views to be filled, which are let go then."""

    def __init__(self, make: Make, matrix: Matrix, scheme: Scheme) -> None:
        super().__init__(make, matrix, scheme)
        self.bias_bytes = 0 if self.bias is None else self.bias.nbytes

    def finish(self) -> None:
        """See `Linear`; nothing is made of it."""
        self.weight = self.bias = None
        self.run = self.product = InStack()

    @property
    def n_bytes(self) -> int:
        """See `Linear`."""
        return self.scheme.n_bytes(self.matrix.n_out, self.matrix.n_in) + self.bias_bytes


class CodedSlice(Slice):
    """An expert's matrix in codes: views to be filled, or a floating matrix of which they are made."""

    def __init__(self, stack: CodedStack, expert: int, make: Make, matrix: Matrix) -> None:
        self.stack, self.expert = stack, expert

        def own(*shape: int) -> torch.Tensor:
            return stack.bias[expert] if stack.bias is not None and len(shape) == 1 and shape[0] else make(*shape)

        super().__init__(own, matrix, stack.scheme)

    def _begun(self, scheme: FilledScheme, device: torch.device) -> Product:
        return scheme.product(self._views(), self.matrix.n_in)

    def _views(self) -> dict[str, torch.Tensor]:
        return self.scheme.of_bank(self.stack.stored, self.expert)

    def finish(self) -> None:
        """See `Linear`."""
        if self.weight is not None and not isinstance(self.scheme, FilledScheme):
            views = self._views()
            for name, tensor in self._finished(self.scheme, self.weight).tensors.items():
                views[name].copy_(tensor)
        super().finish()


class InStack:
    """The product with an expert's matrix: only all of them are multiplied by at once, see `moe.experts`."""

    tensors: dict[str, torch.Tensor] = {}

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: NormPair | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Not to be called."""
        raise TypeError("an expert of a stack is not multiplied by alone")


def bank_of(make: Make, matrices: list[Matrix], schemes: Schemes) -> Bank:
    """Matrices of one name (`Matrix.bank`), one of each expert."""
    found = {schemes.of(matrix) for matrix in matrices}
    scheme = found.pop()
    if not found and type(scheme) is Plain:
        return Stack(make, matrices, scheme)
    if not found and scheme.makes_banks:
        return CodedStack(make, matrices, scheme)
    return Bank([Linear(make, matrix, schemes.of(matrix)) for matrix in matrices])


def _biases(make: Make, matrices: list[Matrix]) -> torch.Tensor | None:
    return make(len(matrices), matrices[0].n_out) if matrices[0].bias else None


def _view(views: dict[int, torch.Tensor | None], *shape: int) -> torch.Tensor:
    """For a `Make`: those of a matrix, by their number of dimensions."""
    found = views[len(shape)]
    assert found is not None
    return found
