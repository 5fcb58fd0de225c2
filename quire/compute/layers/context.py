"""`Context`: how a model's attention reaches the KV pages of a step. An argument of forward, never a global."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.kernels.attention.variant import Variant
from quire.kernels.state import StateSpans


class Whole(Protocol):
    """Rows of whole sequences of a step, and the others."""

    rows: torch.Tensor
    others: torch.Tensor
    """int64."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Causal attention among the rows of each whole sequence: [n_rows, n_heads, d], as q, k and v are."""
        ...


class Context(Protocol):
    """One step's batch: it knows the spans, the pages and the attention plan; the model knows none of them."""

    @property
    def whole(self) -> Whole | None:
        """Sequences that this step computes from their first token on, whose rows `attend` leaves out; None: it takes
        all. Only where tokens leave lines."""
        ...

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

    def lines(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """The lines of these rows, int64, of the step, after `store_lines`."""
        ...

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Attention to the pages of `layer`, after `store`. q: [n, n_heads, head_dim]; returns the same, contiguous,
        with the dimensions of a value."""
        ...

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        """What the recurrent mixer of `layer` keeps (`StateSpec`), a line for each sequence, and which spans go on from
        which lines."""
        ...
