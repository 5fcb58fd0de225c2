"""A residual stream in float32 under parameters of two bytes (`ModelArch.float32_stream`): its layers and last norm.

Owns where rows are rounded: before a layer's norm, and behind the last one, as in transformers. Layers that only add
their mixer's result to the stream, or follow it with a feed-forward of their own norm.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.compute.layers.context import Context
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.norm import Norm
from quire.kernels.norm import rms_norm


class Float32StreamLayer(DecoderLayer):
    """See `DecoderLayer`. Products do not add to the stream themselves, as their results are of another type."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        assert self.attention_norm is not None and self.attention_norm.weight is not None
        self._dtype = self.attention_norm.weight.dtype
        for point in (self.attention_sum, self.ffn.sum):
            point.is_apart = True

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, context: Context, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `DecoderLayer`."""
        y = self.mixer(x.to(self._dtype), self.attention_norm, positions, context)
        if wanted is not None:
            x, y = x[wanted], y[wanted]
        x = self.attention_sum(y, x)
        return self.ffn.add(self.ffn.take(x.to(self._dtype), self.ffn_norm), x)


class Float32StreamNorm(Norm):
    """An RMS norm of float32 rows that gives rows of its weight's type."""

    pair = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Norm`."""
        assert self.weight is not None
        return rms_norm(x, self.weight.float(), self.eps).to(self.weight.dtype)
