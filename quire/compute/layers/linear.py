"""Linear layers: one matrix product for several projections that read the same input.

Owns the parameters, their split into the checkpoint's parts, and when a matrix is finished. Does not own their names
(`config/parameters`), nor what matrices are stored as and how they are multiplied (`compute/schemes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.compute.schemes.launched import Launched
from quire.compute.schemes.packed import PackedProduct, Scheme
from quire.compute.schemes.plain import PlainProduct
from quire.compute.schemes.scheme import FilledScheme, MatrixScheme, Product
from quire.config.parameters import Kept, Matrix, Tensor
from quire.core.errors import LoadError
from quire.kernels import gemm, lora
from quire.kernels.fused_step import FusedStep
from quire.kernels.gemm import Norm
from quire.kernels.qgemm.cpu import NOTHING, SILU_MUL

Make = Callable[..., torch.Tensor]
"""`make(*shape)`: an uninitialised tensor of the model's dtype, where the model lives."""


class Linear:
    """y = x @ weight.T + bias, where the rows of `weight` are several projections under one another.

    Parameters are filled through `part`; then `finish` makes of the matrix what its scheme stores. The matrix of a
    scheme that is filled is not there: its product is filled by whoever reads the file.
    """

    def __init__(self, make: Make, matrix: Matrix, scheme: Scheme, *, tied: torch.Tensor | None = None) -> None:
        """tied: a matrix [n_out, n_in] owned by another layer, used instead of an own one."""
        self.matrix, self.scheme = matrix, scheme
        self.is_tied = tied is not None
        self.weight: torch.Tensor | None = None
        """The floating matrix, until it is finished."""
        self.product: Product
        if isinstance(scheme, FilledScheme):
            self.product = self._begun(scheme, make(0).device)
        else:
            self.weight = self._made(make, matrix.n_out, matrix.n_in) if tied is None else tied
            self.product = PlainProduct(self.weight)
        self.run: Product = self.product
        """What a call goes through: the product, or what adapters have put around it."""
        self.places: lora.Places | None = None
        """On a CPU what adapters add to it, where it has any."""
        self.bias = self._made(make, matrix.n_out) if matrix.bias else None

    def _begun(self, scheme: FilledScheme, device: torch.device) -> Product:
        return scheme.begin(self.matrix.n_out, self.matrix.n_in, device)

    def _made(self, make: Make, *shape: int) -> torch.Tensor:
        return make(*shape).float() if self.matrix.kept is Kept.FLOAT32 else make(*shape)

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
        return self.run(x, self.bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it keeps."""
        yield from self.product.tensors.values()
        if self.bias is not None:
            yield self.bias

    @property
    def floating(self) -> torch.Tensor | None:
        """The matrix [n_out, n_in], where it is stored as it is and nothing stands around its product."""
        return self.run.weight if isinstance(self.run, PlainProduct) else None

    @property
    def plain_shapes(self) -> set[tuple[int, int]]:
        """[n, k] of the floating matrices that `gemm.linear` is given for it."""
        return {(self.matrix.n_out, self.matrix.n_in)} if isinstance(self.product, PlainProduct) else set()

    @property
    def coded_shapes(self) -> set[tuple[tuple[int, int], gemm.Coded]]:
        """[n, k] of a matrix of codes, and which kernels its product wants, for `gemm.build`."""
        ahead = self.product.ahead if isinstance(self.product, Launched) else None
        return set() if ahead is None else {((self.matrix.n_out, self.matrix.n_in), ahead)}

    def record(
        self, fused: FusedStep, x: torch.Tensor, out: torch.Tensor, *, norm: Norm | None = None, then: int = NOTHING
    ) -> None:
        """The packed product as the next operation of `fused`, on the rows of `x` and into those of `out`, and what
        adapters add to it where rows may have some."""
        assert isinstance(self.product, PackedProduct)
        if not fused.has_adapters or self.places is None:
            self.product.record(fused, x, self.bias, out, norm=norm, then=then)
            return
        is_gated = then == SILU_MUL  # which is done with what is added, too
        target = fused.between(out, self.matrix.n_out) if is_gated else out
        self.product.record(fused, x, self.bias, target, norm=norm, then=NOTHING if is_gated else then)
        fused.add_lines(x, self.places, target, norm=norm)
        if is_gated:
            fused.silu_mul(target, out)

    def kernel(
        self,
        *,
        norm: bool = False,
        silu_mul: bool = False,
        residual: bool = False,
        wide: bool = False,
        sent_to: int = 0,
    ) -> gemm.LinearShape:
        """What `gemm.build` needs to know; the arguments say what its calls have around the product."""
        n, k = self.matrix.n_out, self.matrix.n_in
        return gemm.LinearShape(n, k, norm, silu_mul, residual, self.bias is not None, wide, sent_to)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """The parameters of projection `index` that are still to be filled, by their kind in the checkpoint: contiguous
        views to copy into."""
        sizes = [rows for _, rows in self.matrix.parts]
        return {
            kind: tensor.split(sizes)[index]  # type: ignore[no-untyped-call]
            for kind, tensor in self.parameters().items()
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Those of all projections, by their kind."""
        both = {"weight": self.weight, "bias": self.bias}
        return {kind: tensor for kind, tensor in both.items() if tensor is not None}

    def finish(self) -> None:
        """Make of the matrix what its scheme stores, when all parameters are in place; a second call does nothing.

        The floating matrix is let go, unless it is what is stored. A tied one stays with its owner, and this layer has
        its own copy of it from now on, unless it is stored as it is.
        """
        if self.weight is not None and not isinstance(self.scheme, FilledScheme):
            self.run = self.product = self._finished(self.scheme, self.weight)
            self.weight = None

    def _finished(self, scheme: MatrixScheme, weight: torch.Tensor) -> Product:
        """What a scheme makes of the complete matrix. LoadError names the projections that it cannot take: those with
        an infinity or a NaN, else all of them."""
        try:
            return scheme.finish(weight)
        except ValueError as error:
            names = [name for name, _ in self.matrix.parts]
            rows = torch.split(weight, [n_rows for _, n_rows in self.matrix.parts])
            bad = [name for name, own in zip(names, rows, strict=True) if not bool(own.isfinite().all())]
            who = ", ".join(f"{name}.weight" for name in bad or names)
            raise LoadError(f"{who} cannot be kept as {scheme.name}: {error}; run without --quantization") from None

    @property
    def n_bytes(self) -> int:
        """Memory of the finished parameters, without those that another layer owns."""
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        is_shared = self.is_tied and self.scheme.keeps_matrix
        return bias_bytes + (0 if is_shared else self.scheme.n_bytes(self.matrix.n_out, self.matrix.n_in))


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


class Table:
    """Numbers that a layer reads as they are."""

    def __init__(self, make: Make, table: Tensor) -> None:
        self.table = table
        self.values = make(*table.shape).float() if table.is_float32 else make(*table.shape)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; it has one part."""
        return {self.table.kind: self.values}
