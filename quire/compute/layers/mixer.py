"""`Mixer`: what a decoder layer asks of its token mixer, whatever kind it is.

Owns the protocol. Does not own which kind a description has (`mixers`), nor what becomes of the result
(`decoder_layer`). Invariant: a row's result is what goes into `out`; nothing is added to the residual stream here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quire.compute.dist.added import RankSum
from quire.compute.layers.context import Context
from quire.compute.layers.linear import Linear, Table
from quire.compute.layers.norm import Norm
from quire.kernels import gemm
from quire.kernels.attention.variant import Variant


class Mixer(Protocol):
    """Made as `Attention` is."""

    out: Linear
    """What its result goes into, row-parallel."""
    variant: Variant | None
    """What it asks of attention; None: it has none."""
    is_plain: bool
    """Whether it is the attention that a fused step can record."""
    cos_sin: torch.Tensor
    """Rotary table; of a head's layer it is set, and taken away, from outside."""

    ranks: RankSum | None
    """Those that have parts of its heads, to be set from outside before there is a step; None: all are here."""

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """x: [n, hidden]; norm: of it, None where it is normed → [n, inputs of `out`], of the tokens at positions [n],
        which leave in the context what later ones need of them."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All that have a matrix, in the order of computing, `out` the last."""
        ...

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those that exist."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """Its other parameters."""
        ...

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """The products before `out` as they are called, for `gemm.build`; norm: they take in the layer's."""
        ...
