"""Gated DeltaNet of one layer. Owns its data flow. Does not own states (`Context`)."""

from __future__ import annotations

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.linear import Make
from quire.compute.layers.norm import Norm, project
from quire.compute.layers.recurrent import Recurrent
from quire.compute.schemes.choice import Schemes
from quire.config.delta import DeltaSpec
from quire.config.parameters import MixerParameters
from quire.kernels.state import convolve, norm_gated, scan_delta


class Delta(Recurrent):
    """See `Mixer`."""

    def __init__(
        self,
        spec: DeltaSpec,
        parameters: MixerParameters,
        layer: int,
        make: Make,
        schemes: Schemes,
        cos_sin: torch.Tensor,
    ) -> None:
        super().__init__(parameters, layer, make, schemes, cos_sin)
        self.spec = spec

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        spec, n = self.spec, len(x)
        n_keys, d, e = spec.n_key_heads, spec.key_dim, spec.value_dim
        values = spec.n_value_heads // n_keys * e  # of a key head
        projected = project(self.inputs, x, norm)
        heads = projected[:, : spec.conv_size + spec.inner_size].unflatten(1, (n_keys, -1))  # type: ignore[no-untyped-call]
        q, k, v, gate = heads.split([d, d, values, values], dim=2)
        b, a = projected[:, spec.conv_size + spec.inner_size :].unflatten(1, (n_keys, -1)).chunk(2, dim=2)  # type: ignore[no-untyped-call]
        (inputs, state), spans = context.states(self.layer)
        columns = torch.cat([one.flatten(1) for one in (q, k, v)], dim=1)
        columns = convolve(columns, self.taps, self.conv_bias, inputs, spans, silu=True)
        q, k, v = columns.split([n_keys * d, n_keys * d, spec.inner_size], dim=1)  # type: ignore[no-untyped-call]
        y = scan_delta(
            q.view(n, n_keys, d), k.view(n, n_keys, d), v.view(n, -1, e), a.flatten(1), b.flatten(1),
            self.numbers("A_log"), self.numbers("dt_bias"), state, spans,
        )  # fmt: skip
        return norm_gated(y.view(n, -1), gate.flatten(1), self.norm_weight("head"), spec.eps, size=e, gate_first=False)
