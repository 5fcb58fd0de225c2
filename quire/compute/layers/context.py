"""`Context`: how a model's attention reaches the KV pages of a step. An argument of forward, never a global."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.kernels.attention.variant import Variant
from quire.kernels.state import StateSpans


class Context(Protocol):
    """One step's batch: it knows the spans, the pages and the attention plan; the model knows none of them."""

    def store(
        self,
        layer: int,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """Norm (where there are weights) and rotate q and k; k and v of the step's n tokens go to the pages of `layer`.

        qkv: [n, (n_heads + 2 n_kv_heads) * head_dim], not used afterwards; the other tensors as in
        `kernels.qkv.rotate_and_store`. Returns the queries for `attend`.
        """
        ...

    def store_lines(
        self,
        layer: int,
        lines: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        q: torch.Tensor,
        rotated: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        """The same of latent attention: the lines [n, rank + d] of the step's tokens are normed and rotated on their
        way to the pages, q [n, n_heads, d] on its way to `rotated`; see `kernels.mla.store`."""
        ...

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Attention to the pages of `layer`, after `store`. q: [n, n_heads, head_dim]; returns the same, contiguous,
        with the dimensions of a value."""
        ...

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        """What the recurrent mixer of `layer` keeps (`StateSpec`), a line for each sequence, and which spans go on from
        which lines."""
        ...
