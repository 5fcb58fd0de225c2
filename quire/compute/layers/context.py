"""`Context`: how a model's attention reaches the KV pages of a step. An argument of forward, never a global."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.kernels.attention import Variant


class Context(Protocol):
    """One step's batch: it knows the spans, the pages and the attention plan; the model knows none of them."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Store k and v of the step's n tokens in the pages of `layer`, then attend.

        q: [n, n_heads, head_dim], k, v: [n, n_kv_heads, head_dim], rotated, model dtype, last dimension contiguous
        (slices of a fused projection are usual). Returns [n, n_heads, head_dim], contiguous.
        """
        ...
