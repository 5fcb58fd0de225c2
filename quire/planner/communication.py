"""What the ranks of a mesh send each other in a step, in bytes and calls.

Owns the volumes. Does not own links and their time (`timing`). Bytes are what one rank sends.
Sources: Thakur et al. 2005 (ring all-reduce: 2 (n-1)/n of the data); Shoeybi et al. 2019 (two all-reduces a layer);
Jacobs et al. 2023 (Ulysses: two all-to-alls a layer, of queries, keys and values together, and of what heads make of
them); Liu et al. 2023 ("Ring attention"). Of experts and of tokens: `exchange`, `context`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from quire.config.mesh import Mesh
from quire.planner.context import ring_queries_bytes, ulysses_bytes
from quire.planner.exchange import dispatched_bytes, gathered_bytes, gathers
from quire.planner.mesh import own_rows
from quire.planner.parts import AttentionGroup, Product, RankParts

COUNT_BYTES: Final = 8
"""A number of rows, before they are sent."""
Held = Mapping[AttentionGroup, float]
"""Bytes of keys and values that the rows of a step see in a layer, of those that one rank has."""


@enum.unique
class Pattern(enum.Enum):
    """Who talks to whom."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    SEND = "send"


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kind in a step."""

    name: str
    pattern: Pattern
    n_ranks: int
    n_times: int
    n_bytes: float
    """That one rank sends in one call."""
    data_bytes: float
    """Of the tensor, whole."""
    n_inner: int = 1
    """From one of these ranks to the next: those of inner kinds of parallelism lie between them."""


def all_reduce_bytes(data_bytes: float, n_ranks: int) -> float:
    """That a rank sends: the ring's, which is also the least."""
    return 2 * (n_ranks - 1) / n_ranks * data_bytes


def logits_transfers(parts: RankParts, mesh: Mesh, n_wants: int, itemsize: int) -> list[Transfer]:
    """Of the rows that want a token."""
    if mesh.tp == 1 or not n_wants:
        return []
    logits = n_wants * parts.head.n_out * itemsize
    return [Transfer(
        name="logits (tp)", pattern=Pattern.ALL_GATHER, n_ranks=mesh.tp, n_times=1, n_bytes=(mesh.tp - 1) * logits,
        data_bytes=mesh.tp * logits,
    )]  # fmt: skip


def step_transfers(
    parts: RankParts, mesh: Mesh, n_rows: float, n_wants: int, itemsize: int, held: Held | None = None
) -> list[Transfer]:
    """Of one rank of each stage; n_rows: of the whole step, before rows are divided. held: for a ring, where the step's
    lengths are known."""
    found, n_all, n_rows = [], n_rows, own_rows(mesh, n_rows)
    if mesh.tp > 1:
        n_times = _n_sums(parts.products) + 1  # the embedding is divided by rows
        n_late = n_late_sums(parts, mesh) if 0 < n_wants < n_rows else 0
        found.append(sum_transfer(parts, mesh, n_times - n_late, n_rows, itemsize))
        if n_late:
            found.append(sum_transfer(parts, mesh, n_late, n_wants, itemsize, ", last layer"))
        found += logits_transfers(parts, mesh, n_wants, itemsize)
    if mesh.sends_rows:
        found += exchange_transfers(parts, mesh, n_rows, n_rows, itemsize)
    if mesh.n_token_ranks > 1:
        found += context_transfers(parts, mesh, n_all, itemsize, held)
    if mesh.pp > 1:
        data = n_rows * parts.hidden_size * itemsize
        found.append(Transfer(
            name="stage to stage (pp)", pattern=Pattern.SEND, n_ranks=2, n_times=mesh.pp - 1, n_bytes=data,
            data_bytes=data, n_inner=mesh.n_stage_ranks,
        ))  # fmt: skip
    return found


def sum_transfer(parts: RankParts, mesh: Mesh, n_times: int, n_rows: float, itemsize: int, where: str = "") -> Transfer:
    """Sums of so many rows over the ranks that share a layer."""
    data = n_rows * parts.hidden_size * itemsize
    return Transfer(
        name=f"all-reduce (tp{where})", pattern=Pattern.ALL_REDUCE, n_ranks=mesh.tp, n_times=n_times,
        n_bytes=all_reduce_bytes(data, mesh.tp), data_bytes=data,
    )  # fmt: skip


def n_late_sums(parts: RankParts, mesh: Mesh) -> int:
    """Those of the last layer behind its attention, where only rows that want a token are summed."""
    return 0 if mesh.tp == 1 or mesh.sends_rows else _n_sums(parts.last)


def _n_sums(products: Iterable[Product]) -> int:
    """A shared expert and the chosen ones are summed before they are reduced, and so are both matrices of a layer."""
    return sum(one.n_times for one in products if one.reduces and one.name != "shared down")


def exchange_transfers(parts: RankParts, mesh: Mesh, n_most: float, n_mean: float, itemsize: int) -> list[Transfer]:
    """Of all layers whose rows go to experts of other ranks. n_most: rows of the data-parallel rank that has the most;
    n_mean: of all in the mean. Of ranks that share a layer each sends every tp-th row."""
    found, row_bytes = [], float(parts.hidden_size * itemsize)
    most, mean = float(-(-n_most // mesh.tp)), n_mean / mesh.tp

    def add(pattern: Pattern, n_times: int, n_bytes: float, what: str = "ep") -> None:
        """n_bytes: of one call."""
        found.append(Transfer(
            name=f"{pattern.value} ({what})", pattern=pattern, n_ranks=mesh.ep, n_times=n_times * one.n_times,
            n_bytes=n_bytes, data_bytes=n_bytes,
        ))  # fmt: skip

    for one in parts.products:
        if not (one.is_experts and one.reduces):
            continue
        if gathers(most, mean, row_bytes, one.n_chosen, one.n_of_all, mesh.ep):
            back = (mesh.ep - 1) * most * row_bytes
            add(Pattern.ALL_GATHER, 2, (gathered_bytes(most, row_bytes, one.n_chosen, mesh.ep) - back) / 2)
            add(Pattern.REDUCE_SCATTER, 1, back)
        else:
            add(Pattern.ALL_GATHER, 1, (mesh.ep - 1) * mesh.ep * COUNT_BYTES, "counts, ep")
            add(Pattern.ALL_TO_ALL, 3, dispatched_bytes(mean, row_bytes, one.n_chosen, one.n_of_all, mesh.ep) / 3)
    return found


def context_transfers(parts: RankParts, mesh: Mesh, n_all: float, itemsize: int, held: Held | None) -> list[Transfer]:
    """Of ranks that share the rows of a step; n_all: all of them. In a ring queries go round, or keys and values where
    these are fewer bytes; None: queries do."""
    found, n_rows = [], own_rows(mesh, n_all)

    def add(name: str, pattern: Pattern, n_ranks: int, n_times: int, n_bytes: float) -> None:
        """n_bytes: of all calls of a layer."""
        if n_ranks > 1:
            found.append(Transfer(
                name=f"{pattern.value} ({name})", pattern=pattern, n_ranks=n_ranks, n_times=n_times * group.n_times,
                n_bytes=n_bytes / n_times, data_bytes=n_bytes / n_times, n_inner=mesh.sp if name == "ring" else 1,
            ))  # fmt: skip

    for group in parts.attentions:
        own, size, sp, ring = group.q_numbers, group.head_dim, mesh.sp, mesh.ring
        if n_rows == n_all:  # each rank has all rows: what heads, or keys, make of them is gathered
            add("sp", Pattern.ALL_GATHER, sp, 1, (sp - 1) * n_rows * own * itemsize)
            add("ring", Pattern.ALL_GATHER, ring, 1, (ring - 1) * n_rows * own * itemsize)
            continue
        # what a token leaves on a rank is a mean over the ring
        sent = ulysses_bytes(n_rows, own + group.token_numbers * ring, own, itemsize, sp)
        add("sp", Pattern.ALL_TO_ALL, sp, 2, sent)
        queries = ring_queries_bytes(n_rows * sp, own // size, size, size, itemsize, ring)
        keys = queries if held is None else (ring - 1) * held[group]
        if queries <= keys:
            add("ring", Pattern.SEND, ring, 2 * max(1, ring - 1), queries)
        else:
            add("ring", Pattern.SEND, ring, max(1, ring - 1), keys)
    return found
