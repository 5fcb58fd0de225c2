"""How a product with 4-bit weights is cut for csrc/cuda/gemm.cu and gemm_wide.cu. Plain arithmetic, no torch.

Invariant: a plan depends on shapes only, so that the same shapes give the same bits and a captured graph stays valid.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from quire.kernels.gemm import wide
from quire.kernels.gemm.plan import (
    LARGE_CLUSTER_BLOCKS,
    MAX_BYTES,
    MAX_RESIDENT_ROWS,
    MAX_STAGES,
    Plan,
    max_clusters,
)
from quire.kernels.gemm.wide import WidePlan

CHUNK = 256
"""Columns of codes that one 128-byte row of shared memory holds."""
WIDE_CHUNK = 128
"""The same of a product of many rows."""
ROWS = 64
"""Of a tile."""
PAIRED_ROWS, OWN_ROWS = 32, 32
"""The same where two chunks lie side by side in a stage; of two warps that have rows of their own."""
GROUPS, PAIRS_OF_WARPS = 3, (4, 5, 6, 7)
"""Warpgroups, which take the stages of a tile in turn; pairs of warps that have rows of their own. For more of either
there are no registers with 16 tokens."""
MAX_FEW_ROWS = MAX_RESIDENT_ROWS
CLUSTERS = (1, 2, 4, 8)
WIDE_SPLITS = {32: (1, 2, 4), **wide.SPLITS}
"""As `SPLITS` of `gemm.wide`."""
START_US, CHUNK_US, PASS_US = 2.9, {8: 0.036, 16: 0.103}, (0.4, 1.15)
"""Of few rows, fitted to an H200: a launch; a chunk of 64 rows by its tokens; what a further tile costs a block, and a
cluster."""
W_MB_US, BLOCK_MB_US, X_MB_US, EXCHANGE_US = 4.75, 0.12, 67.0, 0.8
"""The same: megabytes a microsecond of weights from memory, of all that comes to a block, of x to all of them; what
doubling the cluster costs."""
UNIT_US, TOKEN_US, MAKE_US, GFLOP_US = 0.07, 0.0049, 0.42, 0.8
"""Of many rows: a chunk of a tile, and each of its tokens; numbers of its codes; what the power limit allows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Int4Shape:
    """The shape of one product; n: rows of the matrix, gate and up together."""

    m: int
    n: int
    k: int
    group: int
    zeros: bool

    @property
    def tokens(self) -> int:
        """Columns of the matrix instructions."""
        return 8 if self.m <= 8 else 16

    def groups_of(self, n_columns: int) -> int:
        """Groups that so many columns have."""
        return max(1, n_columns // self.group)


@functools.cache
def plan(product: Int4Shape, n_processors: int) -> Plan:
    """The cheapest plan by the model of `plan_us`, of at most `MAX_FEW_ROWS` rows."""
    return min(_candidates(product, n_processors), key=lambda one: plan_us(product, one))


def _candidates(product: Int4Shape, n_processors: int) -> Iterator[Plan]:
    for cluster in CLUSTERS:
        most = max_clusters(cluster, n_processors)
        if cluster >= 4:
            most = min(most, LARGE_CLUSTER_BLOCKS // cluster)  # no two on a multiprocessor
        if product.k // CHUNK >= cluster:
            yield from _with_ring(product, Plan(cluster, GROUPS, False, False, _even(product.n, ROWS, most), 0))
    if product.group <= CHUNK:  # else both chunks could be of one group
        n_blocks = _even(product.n, PAIRED_ROWS, n_processors)
        yield from _with_ring(product, Plan(1, GROUPS, False, False, n_blocks, 0, paired=True))
    for pairs in PAIRS_OF_WARPS:
        n_blocks = _even(product.n, OWN_ROWS * pairs, n_processors)
        yield from _with_ring(product, Plan(1, pairs, True, False, n_blocks, 0))


def _even(n: int, rows: int, most: int) -> int:
    """Clusters of which none has a tile more than it must."""
    n_tiles = math.ceil(n / rows)
    return math.ceil(n_tiles / math.ceil(n_tiles / most))


def _with_ring(product: Int4Shape, made: Plan) -> Iterator[Plan]:
    """The plan with as many stages as fit, if any do. Where warpgroups take them in turn, the same one takes what is in
    a stage each time: a parity tells only neighbours apart."""
    rest = shared_bytes(product, made, 0)
    stage = shared_bytes(product, made, 1) - rest
    n_stages = min(MAX_STAGES, (MAX_BYTES - rest) // stage)
    if not made.turns:
        n_stages -= n_stages % made.groups
    if n_stages > 0:
        yield dataclasses.replace(made, n_stages=n_stages)


def tile_rows(plan: Plan) -> int:
    """Rows of the matrix in a tile."""
    return OWN_ROWS * plan.groups if plan.turns else PAIRED_ROWS if plan.paired else ROWS


def _stage_chunks(plan: Plan) -> int:
    return 2 if plan.paired else 1


def _scale_bytes(product: Int4Shape, plan: Plan) -> int:
    """Of a stage."""
    n_lines = _stage_chunks(plan) * product.groups_of(CHUNK) * (1 + product.zeros)
    return math.ceil(n_lines * tile_rows(plan) * 2 / 128) * 128


def shared_bytes(product: Int4Shape, plan: Plan, n_stages: int) -> int:
    """Shared memory of a block: `Layout` in csrc/cuda/gemm/block.h."""
    rows, chunks, tokens = tile_rows(plan), _stage_chunks(plan), product.tokens
    total = n_stages * (chunks * (rows * 128 + tokens * CHUNK * 2) + _scale_bytes(product, plan))
    sources = 2 * chunks * (1 if plan.turns else plan.groups)
    total += sources * rows * tokens * 4 + (plan.groups * ROWS * tokens * 4 if plan.cluster > 1 else 0)
    return total + 8 * (2 * MAX_STAGES + 3 * plan.groups + 3)


def plan_us(product: Int4Shape, plan: Plan) -> float:
    """About how long it takes. What memory and a block take hardly hide one another at these sizes: they are added."""
    rows, beside = tile_rows(plan), _stage_chunks(plan)
    n_chunks = math.ceil(product.k / CHUNK / beside / plan.cluster) * beside
    n_passes = math.ceil(math.ceil(product.n / rows) / plan.n_clusters)
    scales = 2 * product.groups_of(CHUNK) * (1 + product.zeros)  # bytes of a row's chunk
    w_mb = 1e-6 * product.n * product.k / CHUNK * (128 + scales)
    block_x_mb = 2e-6 * n_passes * n_chunks * CHUNK * product.tokens
    block_mb = 1e-6 * n_passes * n_chunks * rows * (128 + scales) + block_x_mb
    exchange_us = EXCHANGE_US * (1 + product.tokens / 32) * math.log2(plan.cluster)
    return (
        START_US
        + max(w_mb / W_MB_US, block_mb / BLOCK_MB_US)
        + plan.n_clusters * plan.cluster * block_x_mb / X_MB_US
        + n_passes * n_chunks * rows / ROWS * CHUNK_US[product.tokens]
        + exchange_us
        + PASS_US[plan.cluster > 1] * (n_passes - 1)
    )


@functools.cache
def wide_plan(product: Int4Shape, n_processors: int, *, alone: bool = False) -> WidePlan:
    """The cheapest plan for many rows by the model of `wide_us`. alone: K is not split."""
    found = [one for one in wide_candidates(product, n_processors) if one.split == 1 or not alone]
    return min(found, key=lambda one: wide_us(product, one, n_processors))


def wide_candidates(product: Int4Shape, n_processors: int) -> Iterator[WidePlan]:
    """All that can run."""
    for tokens, splits in WIDE_SPLITS.items():
        tiles = _wide_tiles(product, tokens)
        together = max(1, min(math.ceil(product.m / tokens), wide.L2_BYTES // (tokens * product.k * 2)))
        for split in splits:
            if split == 1:
                yield WidePlan(tokens, 1, math.ceil(tiles / math.ceil(tiles / n_processors)), together)
            elif tiles * split <= n_processors and product.k // WIDE_CHUNK >= split:
                yield WidePlan(tokens, split, tiles, together)


def _wide_tiles(product: Int4Shape, tokens: int) -> int:
    return math.ceil(product.n / wide.TILE_ROWS) * math.ceil(product.m / tokens)


def wide_us(product: Int4Shape, plan: WidePlan, n_processors: int) -> float:
    """About how long it takes."""
    tiles, share = _wide_tiles(product, plan.tokens), plan.tokens / 128
    n_passes = math.ceil(tiles / plan.n_teams)
    n_units = product.k / WIDE_CHUNK / plan.split * n_passes
    stage_kb = (wide.TILE_ROWS / 2 + plan.tokens * 2) * WIDE_CHUNK / 1024
    parts = (
        n_units * (UNIT_US + TOKEN_US * plan.tokens),
        n_units * MAKE_US,
        n_units * stage_kb / wide.INGEST_KB_US,
        tiles * product.k / WIDE_CHUNK * stage_kb / wide.L2_KB_US,
        product.n * product.k * 0.5e-6 / wide.DRAM_MB_US,
        tiles * wide.TILE_ROWS * plan.tokens * product.k * 2e-9 / GFLOP_US,
    )
    work_us: float = sum(part**wide.SHARPNESS for part in parts) ** (1 / wide.SHARPNESS)
    exchange_us: float = 0.0 if plan.split == 1 else wide.EXCHANGE_US * (0.3 + share**1.5)
    return wide.START_US + work_us + exchange_us + n_passes * wide.STORE_US * share / plan.split
