"""Mamba-2 of one layer. Owns its data flow. Does not own states (`Context`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.compute.layers.context import Context
from quire.compute.layers.norm import Norm, project
from quire.compute.layers.recurrent import Recurrent
from quire.config.mamba import MambaSpec
from quire.kernels.state import convolve, norm_gated, scan_ssm


class Mamba(Recurrent):
    """See `Mixer`."""

    spec: MambaSpec

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        spec = self.spec
        sizes = [spec.inner_size, spec.conv_size, spec.n_scan_heads]
        gate, columns, dt = project(self.inputs, x, norm).split(sizes, dim=1)  # type: ignore[no-untyped-call]
        (inputs, state), spans = context.states(self.layer)
        columns = convolve(columns, self.taps, self.conv_bias, inputs, spans, silu=True)
        shared = spec.n_groups * spec.state_size
        x, b, c = columns.split([spec.inner_size, shared, shared], dim=1)  # type: ignore[no-untyped-call]
        n, n_groups = len(x), spec.n_groups
        y = scan_ssm(
            x.view(n, spec.n_scan_heads, spec.head_dim), dt, b.view(n, n_groups, -1), c.view(n, n_groups, -1),
            self.numbers("A_log"), self.numbers("D"), self.numbers("dt_bias"), state, spans,
            dt_limit=(spec.dt_min, spec.dt_max),
        )  # fmt: skip
        y, weight = y.view(n, -1), self.norm_weight("gated")
        if spec.n_groups_of_all:
            return self._norm_among(y, gate, weight)
        return norm_gated(y, gate, weight, spec.eps, size=spec.group_size, gate_first=True)

    def _norm_among(self, y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`norm_gated` of columns of one group, of which other ranks have the others."""
        spec, ranks = self.spec, self.ranks
        assert ranks is not None
        wide = torch.promote_types(y.dtype, torch.float32)
        x = y.to(wide) * F.silu(gate.to(wide))
        means = x.new_zeros(len(x), spec.n_groups_of_all)
        means[:, spec.group] = x.square().mean(1)
        mean = ranks.all_reduce(means)[:, spec.group, None] * (spec.n_groups_of_all / ranks.size)
        return (x * torch.rsqrt(mean + spec.eps) * weight.to(wide)).to(y.dtype)
