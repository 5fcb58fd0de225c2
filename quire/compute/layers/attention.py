"""Grouped-query attention of one layer: projections, norms and rotation of queries and keys, and the call to the cache.

Owns the parameters and which variant of the attention library the description asks for. Does not own pages (`Context`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from quire.compute.dist.added import RankSum
from quire.compute.layers.context import Context
from quire.compute.layers.linear import Linear, Make, Table
from quire.compute.layers.norm import Norm, project
from quire.compute.schemes.choice import Schemes
from quire.config.attention import AttentionSpec
from quire.config.layers import NormKind, QKNormScope
from quire.config.parameters import MixerParameters
from quire.kernels import gemm
from quire.kernels.attention.variant import Variant, variants
from quire.kernels.fused_step import FusedStep


class Attention:
    """`cos_sin`: the rotary table of the layer, see `layers.rotary`."""

    ranks: RankSum | None = None

    def __init__(
        self,
        spec: AttentionSpec,
        parameters: MixerParameters,
        layer: int,
        make: Make,
        schemes: Schemes,
        cos_sin: torch.Tensor,
    ) -> None:
        self.spec, self.layer, self.cos_sin = spec, layer, cos_sin
        self.sinks = Table(make, parameters.tensors["sinks"]) if spec.sinks else None
        self.variant = variant_of(spec, cos_sin.device, None if self.sinks is None else self.sinks.values)
        self.qkv, self.out = (
            Linear(make, matrix, schemes.of(matrix)) for matrix in (parameters.matrices[one] for one in ("qkv", "out"))
        )
        self.q_norm, self.k_norm = (
            Norm(make, parameters.norms[which]) if which in parameters.norms else None for which in ("q", "k")
        )
        self.stored_norms = self._stored_norms()
        """(weight of q, weight of k, eps) of the norms that go together with rotation and storing."""
        self.norms_apart = self.q_norm is not None and not self._norms_while_storing
        """Whether norms of queries and keys are done on their own, between projecting and storing."""
        self.is_plain = not spec.qkv_clip and (not self.norms_apart or self._norms_whole)

    def _stored_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        if self.q_norm is None or self.k_norm is None or not self._norms_while_storing:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    @property
    def _norms_while_storing(self) -> bool:
        norm = self.spec.qk_norm
        return norm is not None and norm.scope is QKNormScope.HEAD and norm.norm.kind is NormKind.RMS

    @property
    def _norms_whole(self) -> bool:
        """Whether each is an RMS norm over all heads as one vector."""
        is_all = self.spec.qk_norm is not None and self.spec.qk_norm.scope is QKNormScope.ALL
        return is_all and all(norm.pair is not None for norm in self.norms)

    def record_norms(self, fused: FusedStep, qkv: torch.Tensor) -> None:
        """Those that are done on their own, as operations of `fused`, in place; it is plain."""
        if self.norms_apart:
            for norm, part in self._normed(qkv):
                assert norm.pair is not None
                fused.norm(part, norm.pair, part)

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        return self.mix(project(self.qkv, x, norm), positions, context)

    def mix(self, qkv: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """qkv: [n, (n_heads + 2 n_kv_heads) * head_dim], what the projection gave → [n, q_size], to go into `out`."""
        if self.norms_apart:
            self._norm(qkv)
        if self.spec.qkv_clip:
            qkv.clamp_(-self.spec.qkv_clip, self.spec.qkv_clip)
        q = context.store(self.layer, qkv, *self.stored_norms, positions, self.cos_sin)
        return context.attend(self.layer, q, self.variant).flatten(1)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `Mixer`."""
        return self.qkv, self.out

    @property
    def norms(self) -> tuple[Norm, ...]:
        """See `Mixer`."""
        return tuple(norm for norm in (self.q_norm, self.k_norm) if norm is not None)

    @property
    def tables(self) -> tuple[Table, ...]:
        """See `Mixer`."""
        return () if self.sinks is None else (self.sinks,)

    def kernels(self, *, norm: bool) -> list[gemm.LinearShape]:
        """See `Mixer`."""
        return [self.qkv.kernel(norm=norm)]

    def _norm(self, qkv: torch.Tensor) -> None:
        """Norms over all heads, or with weights for each: in place, before the rotation."""
        if self.ranks is not None and self._norms_whole:
            self._norm_among(qkv, self.ranks)
            return
        for norm, part in self._normed(qkv):
            is_all = len(norm.table.shape) == 1 and norm.table.shape[0] == part.shape[1]
            rows = part if is_all else part.unflatten(1, (-1, self.spec.head_dim))  # type: ignore[no-untyped-call]
            rows.copy_(norm(rows))

    def _norm_among(self, qkv: torch.Tensor, ranks: RankSum) -> None:
        """Norms over all heads, of which other ranks have the others."""
        normed = list(self._normed(qkv))
        wide = torch.promote_types(qkv.dtype, torch.float32)
        means = torch.stack([part.to(wide).square().mean(1) for _, part in normed], dim=1)
        means = ranks.all_reduce(means) / ranks.size
        for (norm, part), mean in zip(normed, means.split(1, dim=1), strict=True):  # type: ignore[no-untyped-call]
            assert norm.weight is not None
            part.copy_(part.to(wide) * torch.rsqrt(mean + norm.eps) * norm.weight.to(wide))

    def _normed(self, qkv: torch.Tensor) -> Iterator[tuple[Norm, torch.Tensor]]:
        """Each norm, and the part of qkv that it is of."""
        q_size, kv_size = self.spec.q_size, self.spec.kv_size
        for norm, part in ((self.q_norm, qkv[:, :q_size]), (self.k_norm, qkv[:, q_size : q_size + kv_size])):
            if norm is not None:
                yield norm, part


def variant_of(spec: AttentionSpec, device: torch.device, sinks: torch.Tensor | None = None) -> Variant:
    """What the description asks of attention, as a variant of the library. sinks: of all heads of the model."""
    own = slice(spec.first_head, spec.first_head + spec.n_heads)
    if sinks is not None:
        return variants.learned_sinks(spec.scale, sinks if len(sinks) == spec.n_heads else sinks[own], spec.window)
    if spec.alibi:
        slopes = torch.tensor(alibi_slopes(spec.n_heads_of_all or spec.n_heads)[own], dtype=torch.float32) * spec.alibi
        return variants.alibi(spec.scale, slopes.to(device))
    if spec.soft_cap:
        return variants.soft_cap(spec.scale, spec.soft_cap, spec.window)
    return Variant(spec.scale, window=spec.window)


def alibi_slopes(n_heads: int) -> list[float]:
    """2^(-8 i / n) for i = 1..n, n a power of two; other counts take every second slope of the next power (Press et al.
    2022, section 3, and its code)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (n_heads - power), 2)]
