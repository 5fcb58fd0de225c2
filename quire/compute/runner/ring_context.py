"""Attention of the rows that a rank of a ring has, layer by layer: what is sent when, and what is made of it.

Owns the messages. Does not own plans (`ring`). Invariants: what goes on to the next rank is sent before it is computed
with; states are merged in the order of ranks, so that a result does not depend on who came when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from quire.compute.dist.comm import Sent
from quire.compute.layers.context import Expanded
from quire.compute.runner.pool import PagedContext
from quire.compute.runner.ring import Ring, RingPlan, Sharing
from quire.kernels import mla
from quire.kernels.attention import op as attention
from quire.kernels.attention.merge import merge
from quire.kernels.attention.variant import Variant
from quire.kernels.kvstore import entry
from quire.kernels.state import StateSpans

State = tuple[torch.Tensor, torch.Tensor]
"""What rows have seen of some keys: (out [n, n_heads, dimensions of a value], lse float32 [n, n_heads])."""


@dataclasses.dataclass(slots=True)
class RingContext:
    """`Context` of one step."""

    ring: Ring
    inner: PagedContext
    """Stores this rank's turns; what is another's goes into the dummy page."""
    sharings: Mapping[int, Sharing]
    """By window of layers."""
    is_divided: bool
    """Whether a rank has its own block alone."""

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
        """See `Context`."""
        return self.inner.store(layer, qkv, q_norm, k_norm, eps, positions, cos_sin)

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
        """See `Context`."""
        self.inner.store_lines(layer, lines, norm, eps, q, rotated, positions, cos_sin)

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
        """See `Context`."""
        return self.inner.ask_lines(layer, lines, norm, eps, q, keys, positions, cos_sin)

    def lines(self, layer: int, piece: slice) -> torch.Tensor:
        """No rows are expanded."""
        raise AssertionError("a ring reads lines as they are")

    def attend_lines(self, layer: int, asked: torch.Tensor, variant: Variant, matrices: torch.Tensor) -> torch.Tensor:
        """See `Context`."""
        return mla.values(self.attend(layer, asked, variant), matrices)

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        """`config/context` refuses recurrent layers."""
        raise AssertionError("no model with recurrent layers has its tokens dealt out")

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """See `Context`."""
        sharing, comm = self.sharings[variant.window], self.ring.comm
        if not self.is_divided:
            state = self._empty(q)
            self._fill(state, layer, q, self.inner.pool.pages_of[layer], sharing.plans[0], variant)
            return merge(*(comm.all_gather(one) for one in state))[0]
        going = self._queries if sharing.pages is None else self._keys
        return merge(*going(layer, q, sharing, variant))[0]

    def _queries(self, layer: int, q: torch.Tensor, sharing: Sharing, variant: Variant) -> State:
        """Queries go round; a rank sends what its keys make of them to where they are from. Returns, stacked by rank,
        what its keys make of this rank's queries."""
        rank, n, comm = self.ring.rank, self.ring.n_ranks, self.ring.comm
        pages, q = self.inner.pool.pages_of[layer], q.contiguous()
        states, begun, away = self._empty(q, n), list[Sent](), list[State]()
        for hop in range(n):
            next_q, turn = torch.empty_like(q), None
            if hop < n - 1:
                turn = comm.exchange(q, (rank + 1) % n, next_q, (rank - 1) % n)
            owner, source = (rank - hop) % n, (rank + hop) % n
            state = self._empty(q) if hop else (states[0][rank], states[1][rank])
            self._fill(state, layer, q, pages, sharing.plans[owner], variant)
            if hop:
                away.append(state)  # to stay there until it is sent
                pairs = zip(state, states, strict=True)
                begun += [comm.exchange(one, owner, found[source], source) for one, found in pairs]
            if turn is not None:
                turn.wait()
                q = next_q
        for one in begun:
            one.wait()
        return states

    def _keys(self, layer: int, q: torch.Tensor, sharing: Sharing, variant: Variant) -> State:
        """Keys and values go round. Returns, stacked by rank, what this rank's queries see of each rank's."""
        assert sharing.pages is not None
        pool, rank, n, comm = self.inner.pool, self.ring.rank, self.ring.n_ranks, self.ring.comm
        (k, v), pages, size = pool.pages_of[layer], sharing.pages[pool.group_of[layer]], pool.value_dim
        stored = [k] if size else [k, v]
        held, states = [entry.movable(one)[pages] for one in stored], self._empty(q, n)
        for hop in range(n):
            later, turns = list[torch.Tensor](), list[Sent]()
            if hop < n - 1:
                later = [torch.empty_like(one) for one in held]
                pairs = zip(held, later, strict=True)
                turns = [comm.exchange(one, (rank + 1) % n, found, (rank - 1) % n) for one, found in pairs]
            owner, (keys, *values) = (rank - hop) % n, [one.view(k.dtype) for one in held]
            now = keys, (values[0] if values else keys[..., :size])
            self._fill((states[0][owner], states[1][owner]), layer, q, now, sharing.plans[owner], variant)
            for turn in turns:
                turn.wait()
            held = later
        return states

    def _empty(self, q: torch.Tensor, *stacked: int) -> State:
        """Of all rows of q, so many times; nothing is in it yet."""
        value_dim = self.inner.pool.value_dim or q.shape[2]
        lse = torch.empty(*stacked, *q.shape[:2], dtype=torch.float32, device=q.device)
        return q.new_empty(*stacked, *q.shape[:2], value_dim), lse

    def _fill(
        self,
        state: State,
        layer: int,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plans: Sequence[RingPlan],
        variant: Variant,
    ) -> None:
        """What all rows of q see. Those that see nothing, and padding, have a sum of weights of 0, and any output."""
        pool, (out, lse) = self.inner.pool, state
        scales = pool.scales.get(layer, entry.UNIT)
        lse.fill_(float("-inf"))
        for one in plans:
            if not one.of_group:
                continue
            rows, plan = one.rows, one.of_group[pool.group_of[layer]]
            own = self.ring.within(layer, variant, one.window)
            attention.run(q[rows], *pages, plan, own, out=out[rows], lse=lse[rows], scales=scales)
            if one.blind is not None:
                lse[rows][one.blind] = float("-inf")
