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
    DRAM_MB_US,
    LARGE_CLUSTER_BLOCKS,
    MAX_BYTES,
    MAX_RESIDENT_ROWS,
    MAX_STAGES,
    PAIR_BYTES,
    STAGING_MB_US,
    Plan,
    is_crowded,
    max_clusters,
)
from quire.kernels.gemm.wide import WidePlan

CHUNK = 256
"""Columns of codes that one 128-byte row of shared memory holds."""
WIDE_CHUNK = 128
"""The same of a product of many rows."""
ROWS = 64
"""Of a tile."""
GROUPS, PAIR_GROUPS = 4, 2
"""Warpgroups, which take the chunks of a tile in turn; those of blocks that leave registers and shared memory for
another, also of the next product, whose weights are on their way then."""
MAX_FEW_ROWS = MAX_RESIDENT_ROWS
CLUSTERS = (1, 2, 4, 8)
WIDE_SPLITS = {32: (1, 2, 4), **wide.SPLITS}
"""As `SPLITS` of `gemm.wide`."""
START_US, CHUNK_US, PASS_US, PAIR_SLOWER = 2.0, {8: 0.255, 16: 0.34}, (0.4, 1.15), 1.5
"""Of few rows, fitted to an H200: a launch; a chunk of a tile by its tokens; what a further tile costs a block, and a
cluster; two warpgroups that share a tile."""
EXCHANGE_US, SHORT_RING = 1.85, 1.15
"""Of few rows: what doubling the cluster costs; how much slower it is when a warpgroup has but one stage."""
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
def plan(product: Int4Shape, n_processors: int) -> Plan | None:
    """The cheapest plan by the model of `plan_us`, or None if none fits."""
    found = list(_candidates(product, n_processors))
    return min(found, key=lambda one: plan_us(product, one, n_processors), default=None)


def _candidates(product: Int4Shape, n_processors: int) -> Iterator[Plan]:
    n_tiles = math.ceil(product.n / ROWS)
    for cluster in CLUSTERS:
        if product.k // CHUNK < cluster:
            continue
        most = max_clusters(cluster, n_processors)
        apart = min(most, LARGE_CLUSTER_BLOCKS // cluster) if cluster >= 4 else most  # no two on a multiprocessor
        for n in {math.ceil(n_tiles / math.ceil(n_tiles / one)) for one in (most, apart)}:
            for groups, limit in ((GROUPS, MAX_BYTES), (PAIR_GROUPS, PAIR_BYTES)):
                made = Plan(cluster, groups, False, True, n, 0)
                if not is_crowded(made) or groups == PAIR_GROUPS:
                    yield from _with_ring(product, made, limit)
    # A tile for each warpgroup: nothing is handed over, so a large matrix takes it.
    n_passes = math.ceil(n_tiles / n_processors / PAIR_GROUPS)
    n_blocks = math.ceil(n_tiles / n_passes / PAIR_GROUPS)
    yield from _with_ring(product, Plan(1, PAIR_GROUPS, True, True, n_blocks, 0), MAX_BYTES)


def _with_ring(product: Int4Shape, made: Plan, limit: int) -> Iterator[Plan]:
    """The plan with as many stages as fit, if any do. The same warpgroup takes what is in a stage each time: a parity
    tells only neighbours apart."""
    rest = shared_bytes(product, made, 0)
    stage = shared_bytes(product, made, 1) - rest
    n_stages = min(MAX_STAGES, (limit - rest) // stage) // made.groups * made.groups
    if n_stages > 0:
        yield dataclasses.replace(made, n_stages=n_stages)


def _slice_chunks(product: Int4Shape, plan: Plan) -> int:
    return math.ceil(product.k / CHUNK / plan.cluster)


def shared_bytes(product: Int4Shape, plan: Plan, n_stages: int) -> int:
    """Shared memory of a block: `Layout` in csrc/cuda/gemm/block.h."""
    total = n_stages * (ROWS * 128 + product.groups_of(CHUNK) * (1 + product.zeros) * ROWS * 2)
    n_added = CHUNK // (32 if product.groups_of(CHUNK) == 8 else 64)  # sums of x that a chunk has of a token
    kept, n_chunks = 1 << (product.m - 1).bit_length(), _slice_chunks(product, plan)  # tokens
    total += n_chunks * kept * CHUNK * 2 + math.ceil(n_chunks * n_added * max(2, kept) * 4 / 128) * 128
    sums = ROWS * product.tokens * 4
    total += 2 * plan.groups * sums + (plan.groups * sums if plan.cluster > 1 else 0)
    return total + 8 * (2 * MAX_STAGES + 3 * plan.groups + 3)


def plan_us(product: Int4Shape, plan: Plan, n_processors: int) -> float:
    """About how long it takes: the slower of memory and one block, then what does not overlap."""
    n_passes = math.ceil(math.ceil(product.n / ROWS) / plan.n_clusters)
    chunk_mb = 1e-6 * (ROWS * 128 + product.groups_of(CHUNK) * (1 + product.zeros) * ROWS * 2)
    n_chunks = _slice_chunks(product, plan)
    x_mb = 2e-6 * n_chunks * CHUNK * (1 << (product.m - 1).bit_length())
    dram_us = product.n / ROWS * product.k / CHUNK * chunk_mb / DRAM_MB_US
    exchange_us = EXCHANGE_US * (1 + product.tokens / 32) * math.log2(plan.cluster)
    if plan.turns:  # a chunk for each of its warpgroups
        n_passes = math.ceil(n_passes / plan.groups) * plan.groups
    else:
        exchange_us += PASS_US[plan.cluster > 1] * (n_passes - 1)
    slower = 2.0 if is_crowded(plan) else PAIR_SLOWER if plan.groups == PAIR_GROUPS and not plan.turns else 1.0
    slower *= SHORT_RING if plan.n_stages == plan.groups else 1.0
    block_us = n_passes * n_chunks * CHUNK_US[product.tokens] * slower
    return START_US + max(dram_us, block_us) + exchange_us + x_mb / STAGING_MB_US


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
