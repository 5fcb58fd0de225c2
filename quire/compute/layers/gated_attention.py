"""Gated attention of one layer. Owns what differs from `attention`."""

from __future__ import annotations

from typing import Any

import torch

from quire.compute.layers.attention import Attention
from quire.compute.layers.context import Context
from quire.compute.layers.norm import Norm, project
from quire.kernels.act import sigmoid


class GatedAttention(Attention):
    """See `Mixer`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.is_plain = False

    def __call__(self, x: torch.Tensor, norm: Norm | None, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """See `Mixer`."""
        spec = self.spec
        projected = project(self.qkv, x, norm)
        q, gate, kv = projected.split([spec.q_size, spec.q_size, 2 * spec.kv_size], dim=1)  # type: ignore[no-untyped-call]
        qkv = torch.cat((q, kv), dim=1)
        q = context.store(self.layer, qkv, *self.stored_norms, positions, self.cos_sin)
        y = context.attend(self.layer, q, self.variant).flatten(1)
        return y.mul_(sigmoid(gate))
