"""`Context`: how a model's attention reaches the KV pages of a step. An argument of forward, never a global."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from quire.kernels.attention.variant import Variant
from quire.kernels.state import StateSpans


class Expanded(Protocol):
    """Rows of a step for which keys and values are made of all lines that they see, and the others."""

    rows: torch.Tensor | slice
    others: torch.Tensor | slice
    """int64, or where they lie side by side."""
    n_rows: int
    n_lines: int

    def heads(self, n_heads: int) -> Iterator[slice]:
        """Those whose keys and values of all lines have room at once, in turn."""
        ...

    def pieces(self) -> Iterator[slice]:
        """Lines that are read at once, in turn."""
        ...

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Causal attention of the rows to their lines: q [n_rows, n_heads, d] and what is returned; k, v [n_lines,
        n_heads, d]."""
        ...


class Context(Protocol):
    """One step's batch: it knows the spans, the pages and the attention plan; the model knows none of them."""

    @property
    def expanded(self) -> Expanded | None:
        """Rows that `attend` leaves out; None: it takes all. Only where tokens leave lines."""
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

    def ask_lines(
        self,
        layer: int,
        lines: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        q: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """`store_lines`, and the queries for `attend` made of q with each head's matrix of keys; see
        `kernels.mla.ask`."""
        ...

    def lines(self, layer: int, piece: slice) -> torch.Tensor:
        """These of the lines that the rows of `expanded` see, after `store_lines`."""
        ...

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Attention to the pages of `layer`, after `store`. q: [n, n_heads, head_dim]; returns the same, contiguous,
        with the dimensions of a value."""
        ...

    def attend_lines(self, layer: int, asked: torch.Tensor, variant: Variant, matrices: torch.Tensor) -> torch.Tensor:
        """`attend`, and of each head its result times its matrix of values; see `kernels.mla.attend`."""
        ...

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        """What the recurrent mixer of `layer` keeps (`StateSpec`), a line for each sequence, and which spans go on from
        which lines."""
        ...
