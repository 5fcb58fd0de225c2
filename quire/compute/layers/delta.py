"""Gated DeltaNet of one layer. Owns its data flow. Does not own states (`Context`)."""

from __future__ import annotations

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.norm import Norm, project
from quire.compute.layers.recurrent import Recurrent
from quire.config.delta import DeltaSpec
from quire.kernels.state import convolve, norm_gated, scan_delta


class Delta(Recurrent):
    """See `Mixer`."""

    spec: DeltaSpec

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        spec, n, keys = self.spec, len(x), self.spec.n_key_heads * self.spec.key_dim
        sizes = [spec.conv_size, spec.inner_size, spec.n_value_heads, spec.n_value_heads]
        columns, gate, b, a = project(self.inputs, x, norm).split(sizes, dim=1)  # type: ignore[no-untyped-call]
        (inputs, state), spans = context.states(self.layer)
        columns = convolve(columns, self.taps, self.conv_bias, inputs, spans, silu=True)
        q, k, v = columns.split([keys, keys, spec.inner_size], dim=1)  # type: ignore[no-untyped-call]
        y = scan_delta(
            q.view(n, -1, spec.key_dim), k.view(n, -1, spec.key_dim), v.view(n, -1, spec.value_dim), a, b,
            self.numbers("A_log"), self.numbers("dt_bias"), state, spans,
        )  # fmt: skip
        weight = self.norm_weight("head")
        return norm_gated(y.view(n, -1), gate, weight, spec.eps, size=spec.value_dim, gate_first=False)
