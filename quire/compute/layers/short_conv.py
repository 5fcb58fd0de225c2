"""The gated short convolution of one layer. Owns its data flow. Does not own states (`Context`)."""

from __future__ import annotations

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.norm import Norm, project
from quire.compute.layers.recurrent import Recurrent
from quire.config.short_conv import ShortConvSpec
from quire.kernels.state import convolve


class ShortConv(Recurrent):
    """See `Mixer`."""

    spec: ShortConvSpec

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        b, c, x = project(self.inputs, x, norm).chunk(3, dim=1)
        (state,), spans = context.states(self.layer)
        return convolve(b * x, self.taps, self.conv_bias, state, spans, silu=False).mul_(c)
