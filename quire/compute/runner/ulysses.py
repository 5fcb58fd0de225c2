"""Ranks that divide the heads of attention, and the rows of long steps for all else (Jacobs et al. 2023, "Ulysses").

Owns what rows become on their way to attention and back. Does not own which steps are divided (`forward/divided`), nor
pages: a rank has those of its own heads for every token, so that control does not know of it.
Invariants: rank r has rows r * m, ..., (r + 1) * m - 1 of a divided step, the last ones of which may be padding; of
another step every rank has all rows, with the same bits.
"""

from __future__ import annotations

import dataclasses

import torch

from quire.compute.dist.comm import MeetingComm
from quire.compute.layers.attention import Attention, variant_of
from quire.compute.layers.context import Context, Expanded
from quire.compute.models.decoder import Decoder
from quire.config.attention import AttentionSpec
from quire.config.context import own_heads
from quire.kernels.attention.variant import Variant
from quire.kernels.state import StateSpans


class Ulysses:
    """One rank's part of the attention of a model that it has whole."""

    def __init__(self, model: Decoder, comm: MeetingComm) -> None:
        self.comm, self.rank, self.n_ranks = comm, comm.rank, comm.size
        self.one_each = [1] * comm.size
        """Parts that go to each rank, and come from each."""
        specs = [layer.spec.mixer for layer in model.layers]
        self.own = [own_heads(spec, self.rank, self.n_ranks) for spec in specs]
        """Of each layer."""
        self.variants = [
            _variant(layer.mixer, own) for layer, own in zip(model.layers, self.own, strict=True)
        ]  # fmt: skip
        """Of its heads."""
        self.whole = [spec for spec in specs if isinstance(spec, AttentionSpec)]

    def around(self, inner: Context, positions: torch.Tensor | None = None) -> Context:
        """inner: of all rows and this rank's heads. positions: of all rows, where a rank has a part of them; None: it
        has all."""
        return UlyssesContext(self, inner, positions)

    def parts(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [m, (n_heads + 2 n_kv_heads) * d] → [n_ranks, m, what one rank's heads need of it]."""
        spec, own, m = self.whole[layer], self.own[layer], len(qkv)
        d, n_times = spec.head_dim, own.n_kv_heads * self.n_ranks // spec.n_kv_heads
        q, k, v = qkv.split([spec.q_size, spec.kv_size, spec.kv_size], dim=1)  # type: ignore[no-untyped-call]
        parts = [q.view(m, self.n_ranks, -1)]
        for kv in (k, v):
            heads = kv.view(m, spec.n_kv_heads, d)
            if n_times > 1:  # several ranks have the same
                heads = heads.repeat_interleave(n_times, dim=1)
            parts.append(heads.reshape(m, self.n_ranks, -1))
        return torch.cat(parts, dim=2).transpose(0, 1).contiguous()

    def own_part(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv as above → the part of this rank [m, ...]."""
        spec, own = self.whole[layer], self.own[layer]
        d, first_q = spec.head_dim, own.first_head * spec.head_dim
        first_kv = own.first_head // (spec.n_heads // spec.n_kv_heads) * d
        starts = (first_q, spec.q_size + first_kv, spec.q_size + spec.kv_size + first_kv)
        sizes = (own.q_size, own.kv_size, own.kv_size)
        return torch.cat([qkv[:, at : at + n] for at, n in zip(starts, sizes, strict=True)], dim=1)


@dataclasses.dataclass(slots=True)
class UlyssesContext:
    """`Context` of the rows that a rank has."""

    ulysses: Ulysses
    inner: Context
    positions: torch.Tensor | None
    """Of all rows [n] of a divided step."""

    @property
    def expanded(self) -> Expanded | None:
        """See `Context`."""
        return None

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
        """See `Context`. Returns the queries of this rank's heads, of all rows."""
        own = self.ulysses
        if self.positions is None:
            rows = own.own_part(layer, qkv)
        else:
            parts = own.comm.all_to_all(own.parts(layer, qkv), own.one_each, own.one_each)
            rows = parts.flatten(0, 1)[: len(self.positions)]
            positions = self.positions
        return self.inner.store(layer, rows, q_norm, k_norm, eps, positions, cos_sin)

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """See `Context`: the rows that `store` was given."""
        own = self.ulysses
        y = self.inner.attend(layer, q, own.variants[layer])
        n, n_heads, d = y.shape
        if self.positions is None:
            found = own.comm.all_gather(y)
        else:
            m = -(-n // own.n_ranks)
            rows = y if m * own.n_ranks == n else torch.cat((y, y.new_zeros(m * own.n_ranks - n, n_heads, d)))
            found = own.comm.all_to_all(rows.view(own.n_ranks, m, n_heads, d), own.one_each, own.one_each)
        return found.transpose(0, 1).reshape(found.shape[1], own.n_ranks * n_heads, d)

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
        """A line has no heads to divide: `config/context` refuses it."""
        raise AssertionError("no model with lines has its heads divided")

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
        """See `store_lines`."""
        raise AssertionError("no model with lines has its heads divided")

    def lines(self, layer: int, piece: slice) -> torch.Tensor:
        """See `store_lines`."""
        raise AssertionError("no model with lines has its heads divided")

    def attend_lines(self, layer: int, asked: torch.Tensor, variant: Variant, matrices: torch.Tensor) -> torch.Tensor:
        """See `store_lines`."""
        raise AssertionError("no model with lines has its heads divided")

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        """Recurrent layers are refused too."""
        raise AssertionError("no model with recurrent layers has its heads divided")


def _variant(mixer: object, own: AttentionSpec) -> Variant:
    assert isinstance(mixer, Attention)
    return variant_of(own, mixer.cos_sin.device, None if mixer.sinks is None else mixer.sinks.values)
