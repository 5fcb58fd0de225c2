"""Mamba-2 of one layer. Owns its data flow. Does not own states (`Context`)."""

from __future__ import annotations

import torch

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
        size = spec.inner_size // spec.n_groups
        return norm_gated(y.view(n, -1), gate, self.norm_weight("gated"), spec.eps, size=size, gate_first=True)
