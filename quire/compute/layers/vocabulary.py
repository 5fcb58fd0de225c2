"""Embedding and head of a model whose vocabulary is divided among ranks: each has some rows of both.

Owns what ranks say to one another about them (Shoeybi et al. 2019, "Megatron-LM", section 3). A rank that is alone has
`Embedding` and `Linear` themselves. Invariant: every rank gets the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.compute.dist.comm import Comm
from quire.compute.layers.linear import Embedding, Linear, Make
from quire.config.shares import Share
from quire.kernels.gemm import Norm


class DividedEmbedding(Embedding):
    """Each rank looks up the ids that it has; the sum over ranks has every row once."""

    def __init__(self, make: Make, share: Share, comm: Comm) -> None:
        ((name, n_rows),) = share.matrix.parts
        super().__init__(make, name, n_rows, share.matrix.n_in)
        ((self._first, _),), self._comm = share.rows[0], comm

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """token_ids: of the whole vocabulary; see `Embedding`."""
        own = token_ids - self._first
        is_other = (own < 0) | (own >= len(self.weight))
        rows = super().__call__(own.clamp_(0, len(self.weight) - 1), out)
        return self._comm.all_reduce(rows.masked_fill_(is_other[:, None], 0))


class DividedHead:
    """Each rank makes the logits of its ids, and gets those of the others."""

    def __init__(self, linear: Linear, vocab_size: int, comm: Comm) -> None:
        """linear: this rank's rows of the head."""
        self._linear, self._vocab_size, self._comm = linear, vocab_size, comm
        self._width = -(-vocab_size // comm.size)

    def __call__(self, x: torch.Tensor, *, norm: Norm | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear`: x [m, hidden] → [m, vocab_size]. Numbers travel in x's dtype, in which they are computed."""
        own = self._linear(x, norm=norm)
        if own.shape[1] < self._width:
            own = F.pad(own, (0, self._width - own.shape[1]))
        found = self._comm.all_gather(own.contiguous())
        if out is None:
            out = found.new_empty(len(x), self._vocab_size)
        is_whole = self._vocab_size == self._width * self._comm.size
        if not is_whole or out.dtype != found.dtype or not out.is_contiguous():
            return out.copy_(found.transpose(0, 1).flatten(1)[:, : self._vocab_size])
        words = found.view(_word(found.element_size() * self._width)).transpose(0, 1)
        out.view(-1).view(words.dtype).view(words.shape).copy_(words)
        return out


def _word(n_bytes: int) -> torch.dtype:
    """The widest numbers of which rows of so many bytes are: torch copies rows apart number by number."""
    return torch.int64 if n_bytes % 8 == 0 else torch.int32 if n_bytes % 4 == 0 else torch.int16
