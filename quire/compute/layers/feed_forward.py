"""What every feed-forward layer is, and that of matrices which each token goes through.

Owns its data flow, in as few launches as the products can take in. Does not own the norm before it (`decoder_layer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from quire.compute.layers.fused_rows import LayerRows
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.norm import Norm, project
from quire.compute.layers.residual import ResidualProduct, ResidualSum
from quire.compute.schemes.choice import Schemes
from quire.config.feed_forward import FeedForwardSpec
from quire.config.parameters import FfnParameters
from quire.kernels import gemm
from quire.kernels.act import activate
from quire.kernels.fused_step import FusedStep
from quire.kernels.qgemm.cpu import ADD, SILU_MUL


class Ffn(Protocol):
    """What a layer makes of each token by itself."""

    @property
    def sum(self) -> ResidualSum:
        """Where that is added to the residual stream."""
        ...

    def take(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """What it needs of x [n, hidden], which is normed first where there is a norm, and may change afterwards."""
        ...

    def add(self, taken: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x: the residual stream [n, hidden], which takes the sum in place and is returned."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All that have a matrix, in the order of computing."""
        ...

    @property
    def adaptable(self) -> tuple[Linear, ...]:
        """Those of them that adapters may add to."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """Its other parameters."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether `record` knows it. Its matrices are finished."""
        ...

    def record(self, fused: FusedStep, rows: LayerRows, norm: Norm) -> None:
        """As operations of `fused`, which add it to the stream `rows.x`, where it is plain; norm: as for `take`."""
        ...

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it keeps, tables left out."""
        ...

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """The products as they are called, for `gemm.build`. norm: the first takes it in."""
        ...

    def build(self, max_rows: int) -> None:
        """Make what other products of steps with up to max_rows rows need, where that takes time."""
        ...


class FeedForward:
    """Two products, see `FeedForwardSpec`."""

    def __init__(
        self,
        spec: FeedForwardSpec,
        parameters: FfnParameters,
        make: Make,
        schemes: Schemes,
        post_norm: Norm | None,
        scale: float,
    ) -> None:
        self.spec = spec
        up, down = parameters.matrices["up"], parameters.matrices["down"]
        self.up, self.down = Linear(make, up, schemes.of(up)), Linear(make, down, schemes.of(down))
        self.sum = ResidualProduct(self.down, post_norm, scale)
        self.tables: tuple[Table, ...] = ()

    def take(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """See `Ffn`: what the last matrix takes [n, size]."""
        ffn = self.spec
        if ffn.is_plain:
            return project(self.up, x, norm, silu_mul=True)
        return activate(project(self.up, x, norm), ffn.activation.value, gated=ffn.gated)

    def add(self, taken: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Ffn`."""
        return self.sum(taken, x)

    def record(self, fused: FusedStep, rows: LayerRows, norm: Norm) -> None:
        """See `Ffn`."""
        self.up.record(fused, rows.x, rows.inner, norm=norm.pair, then=SILU_MUL)
        self.down.record(fused, rows.inner, rows.x, then=ADD)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `Ffn`."""
        return self.up, self.down

    adaptable = linears

    @property
    def is_plain(self) -> bool:
        """See `Ffn`."""
        return self.spec.is_plain and self.sum.adds

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Ffn`."""
        for linear in self.linears:
            yield from linear.tensors()

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Ffn`."""
        down = self.down.kernel(residual=self.sum.adds, sent_to=self.sum.sends_to)
        return [self.up.kernel(norm=norm, silu_mul=self.spec.is_plain), down]

    def build(self, max_rows: int) -> None:
        """See `Ffn`; nothing."""
