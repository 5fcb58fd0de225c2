"""One layer of a decoder: its mixer and feed-forward with the norms around them, as its `LayerSpec` says.

Owns the data flow of a layer, in as few launches as the products can take in, and the same as operations of a fused
step. Does not own pages nor positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.compute.dist.added import RankSum
from quire.compute.layers.attention import Attention
from quire.compute.layers.context import Context
from quire.compute.layers.feed_forward import Ffn
from quire.compute.layers.ffns import FFNS
from quire.compute.layers.fused_rows import LayerRows
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.mixer import Mixer
from quire.compute.layers.mixers import MIXERS
from quire.compute.layers.norm import Norm
from quire.compute.layers.residual import ResidualProduct
from quire.compute.schemes.choice import Schemes
from quire.config.layers import LayerSpec, Placement
from quire.config.parameters import LayerParameters
from quire.kernels import gemm
from quire.kernels.fused_step import FusedStep
from quire.kernels.qgemm.cpu import ADD


class DecoderLayer:
    """Adds what mixer and feed-forward make of the residual stream to it."""

    def __init__(
        self,
        spec: LayerSpec,
        parameters: LayerParameters,
        layer: int,
        make: Make,
        schemes: Schemes,
        cos_sin: torch.Tensor,
    ) -> None:
        self.spec = spec
        self.layer = layer
        self.mixer: Mixer = MIXERS[type(spec.mixer)](spec.mixer, parameters.mixer, layer, make, schemes, cos_sin)
        self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm = (
            None if table is None else Norm(make, table)
            for table in (
                *(parameters.attention_norm, parameters.attention_post_norm),
                *(parameters.ffn_norm, parameters.ffn_post_norm),
            )
        )
        self.attention_sum = ResidualProduct(self.mixer.out, self.attention_post_norm, spec.residual_scale)
        self.ffn: Ffn = FFNS[type(spec.ffn)](
            spec.ffn, parameters.ffn, make, schemes, self.ffn_post_norm, spec.residual_scale
        )

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, context: Context, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: the residual stream [n, hidden], overwritten → the stream after the layer, or the rows `wanted` of it.

        What the mixer keeps is kept of all rows; what follows it is computed for the rows wanted.
        """
        if self.spec.placement is Placement.SHARED:
            assert self.attention_norm is not None
            normed = self.attention_norm(x)
            y = self.mixer(normed, None, positions, context)
            if wanted is not None:
                x, y, normed = x[wanted], y[wanted], normed[wanted]
            taken = self.ffn.take(normed, None)
            return self.ffn.add(taken, self.attention_sum(y, x))
        return self.behind(self.mixer(x, self.attention_norm, positions, context), x, wanted)

    def behind(self, y: torch.Tensor, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """What follows the mixer, which gave y, x being the residual stream; not of `Placement.SHARED`."""
        if wanted is not None:
            x, y = x[wanted], y[wanted]
        if self.spec.placement is Placement.PARALLEL:
            taken = self.ffn.take(x, self.ffn_norm)
            return self.ffn.add(taken, self.attention_sum(y, x))
        rows, norm = self.attention_sum.then(y, x, self.ffn_norm)
        return self.ffn.add(self.ffn.take(rows, norm), x)

    def record(self, fused: FusedStep, rows: LayerRows, *, is_last: bool) -> None:
        """As operations of `fused`; the layer is plain. is_last: what follows attention is for the rows wanted."""
        assert self.attention_norm is not None and isinstance(self.mixer, Attention)
        self.mixer.qkv.record(fused, rows.x, rows.qkv, norm=self.attention_norm.pair)
        self.record_behind(fused, rows, is_last=is_last)

    def record_behind(self, fused: FusedStep, rows: LayerRows, *, is_last: bool) -> None:
        """What follows the projection, as `record`."""
        attention = self.mixer
        assert self.ffn_norm is not None and isinstance(attention, Attention)
        spec, ((k, v), group) = attention.spec, rows.pages[self.layer]
        attention.record_norms(fused, rows.qkv)
        fused.rotate_and_store(rows.qkv, *attention.stored_norms, attention.cos_sin, k, v, group)
        q, out = (x[:, : spec.q_size].unflatten(1, (-1, spec.head_dim)) for x in (rows.qkv, rows.y))
        fused.attend(q, k, v, attention.variant, out, group)
        if is_last:
            fused.take(rows.x)
            fused.take(rows.y)
        attention.out.record(fused, rows.y, rows.x, then=ADD)
        self.ffn.record(fused, rows, self.ffn_norm)

    def sum_over(self, ranks: RankSum) -> None:
        """Other ranks have the other parts of it; to be said before there is a step."""
        for point in (self.attention_sum, self.ffn.sum, self.mixer):
            point.ranks = ranks

    @property
    def is_plain(self) -> bool:
        """Whether `record` knows it: norm, attention, norm and feed-forward, each with what it takes in, no more."""
        return self.spec.is_plain and self.mixer.is_plain and self.attention_sum.adds and self.ffn.is_plain

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All that have a matrix, in the order of computing."""
        return *self.mixer.linears, *self.ffn.linears

    @property
    def tables(self) -> tuple[Table, ...]:
        """Parameters that are neither of a matrix nor of a norm."""
        return *self.mixer.tables, *self.ffn.tables

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that it keeps, norms and tables left out."""
        for linear in self.mixer.linears:
            yield from linear.tensors()
        yield from self.ffn.tensors()
        if self.mixer.variant is not None:
            yield from self.mixer.variant.tensors.values()

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those that exist."""
        around = (self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm)
        return *(norm for norm in around if norm is not None), *self.mixer.norms

    def kernels(self) -> list[gemm.LinearShape]:
        """The products as they are called, for `gemm.build`."""
        is_shared = self.spec.placement is Placement.SHARED

        def takes(norm: Norm | None) -> bool:
            return norm is not None and norm.pair is not None and not is_shared

        return [
            *self.mixer.kernels(norm=takes(self.attention_norm)),
            self.mixer.out.kernel(residual=self.attention_sum.adds, sent_to=self.attention_sum.sends_to),
            *self.ffn.kernels(norm=takes(self.ffn_norm)),
        ]
