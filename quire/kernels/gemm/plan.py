"""How a product of at most 64 rows is cut into tiles, slices and blocks for csrc/cuda/gemm.cu. Plain arithmetic.

Invariant: a plan depends on shapes only, so that the same shapes give the same bits and a captured graph stays valid.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

CHUNK = 64
"""Columns of w that one 128-byte row of shared memory holds."""
ROW_BUCKETS = (8, 16, 32, 64)
MAX_FEW_ROWS = ROW_BUCKETS[-1]
MAX_NORM_ROWS = 16
"""With more rows, each block's own norm of x costs more than one kernel for all."""
MAX_RESIDENT_ROWS = 16
MAX_STAGES, MIN_STAGES = 32, 3
MAX_BYTES = 232_448
"""Shared memory of a Hopper block."""
PAIR_BYTES = 113 << 10
"""So much leaves room for two blocks on a multiprocessor."""
LARGE_CLUSTER_BLOCKS = 96
"""More blocks than this, in clusters of four or eight, are only all placed if two of them share a multiprocessor."""
N_AHEAD = 6
"""Stages asked for in L2 beyond the ring while the previous kernel still runs."""
DRAM_MB_US, BLOCK_MB_US, STAGING_MB_US = 4.5, 0.050, 0.060
"""Megabytes a microsecond: from the device's memory, into one block through its ring, into one block at its start."""
EXCHANGE_US, GROUP_US, STORE_ELEMENTS_US = 0.4, 0.15, 8192
"""What doubling the cluster and each warpgroup cost, and how much a tile stores while nothing multiplies."""
UNEVEN, TRAVEL, SMALL_RING = 0.3, 0.12, 0.01
"""Shares of the time lost: with processors that have no work, when x travels beside w, a token in a ring for pairs."""
RING_BYTES, SHORT_RING = 128 << 10, 0.04
"""So much of w has to be on its way to a processor for its share of memory's rate, and the share of the time that is
lost with none."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProductShape:
    """The shape of one product; n: rows of w, gate and up together."""

    m: int
    n: int
    k: int
    norm: bool = False
    silu: bool = False

    @property
    def tokens(self) -> int:
        """Columns of the matrix instruction."""
        return next(bucket for bucket in ROW_BUCKETS if self.m <= bucket)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is compiled (first four) and what is passed at a launch."""

    cluster: int
    """Blocks that share a tile, each with a slice of K."""
    groups: int
    """Warpgroups that multiply."""
    turns: bool
    """Warpgroups take tiles of 64 rows in turn; else they share one."""
    resident: bool
    """x is kept in shared memory for the whole slice."""
    n_clusters: int
    n_stages: int
    paired: bool = False
    """Of codes of 4 bits: tiles of 32 rows, two chunks of theirs side by side in a stage."""


@functools.cache
def plan(
    product: ProductShape,
    n_processors: int,
    *,
    alone: bool = False,
    exchange_us: float = EXCHANGE_US,
    turns_us: float = 0.0,
) -> Plan | None:
    """The cheapest plan by the model of `plan_us`, or None if none fits (a norm and a huge K). alone: K is not
    split."""
    found = [made for made in _candidates(product, n_processors) if made.cluster == 1 or not alone]
    return min(found, key=lambda one: plan_us(product, one, n_processors, exchange_us, turns_us), default=None)


def _candidates(product: ProductShape, n_processors: int) -> Iterator[Plan]:
    few = product.tokens <= MAX_RESIDENT_ROWS
    for cluster in (1, 2, 4, 8):
        kinds = [(3, True, True)] if few and (cluster < 4 or product.norm) else []
        kinds += [] if product.norm else [(3, True, False)] if few else [(3, True, False), (2, False, False)]
        for groups, turns, resident in kinds:
            made = Plan(cluster, groups, turns, resident, 0, 0)
            n_units = math.ceil(product.k / CHUNK / chunks_of(made))
            if n_units < cluster:
                continue
            n_tiles = tiles_of(product, made)
            n_passes = math.ceil(n_tiles / max_clusters(cluster, n_processors))
            n_clusters = math.ceil(n_tiles / n_passes)
            if resident and cluster == n_passes == 1 and product.tokens == ROW_BUCKETS[0]:
                made = dataclasses.replace(made, groups=1)
            made = dataclasses.replace(made, n_clusters=n_clusters)
            n_stages = _stages(product, made, PAIR_BYTES if is_crowded(made) else MAX_BYTES)
            if n_stages >= MIN_STAGES:
                yield dataclasses.replace(made, n_stages=n_stages)


def tile_rows(plan: Plan) -> int:
    """Rows of w in a tile."""
    return 64 if plan.turns else 64 * plan.groups


def chunks_of(plan: Plan) -> int:
    """Chunks of columns in a stage of the ring."""
    return 2 if tile_rows(plan) == 64 else 1


def tiles_of(product: ProductShape, plan: Plan) -> int:
    """Tiles of w; with SiLU half of a tile's rows are gate, half are up."""
    return math.ceil(product.n / tile_rows(plan))


def shared_bytes(product: ProductShape, plan: Plan, n_stages: int) -> int:
    """Shared memory of a block: `Layout` in csrc/cuda/gemm/block.h."""
    rows, chunks, tokens = tile_rows(plan), chunks_of(plan), product.tokens
    teams = plan.groups if plan.turns else 1
    n_units = math.ceil(product.k / CHUNK / chunks)
    slice_chunks = math.ceil(n_units / plan.cluster) * chunks
    total = n_stages * chunks * 128 * (rows + (0 if plan.resident else tokens))
    total += slice_chunks * tokens * 128 if plan.resident else 0
    total += teams * rows * tokens * 4 if plan.cluster > 1 else 0
    if product.norm:
        total += slice_chunks * (128 + tokens * 4) + (plan.cluster + 1) * tokens * 4
    return total + 8 * (2 * MAX_STAGES + 3 * teams + 3)


def _stages(product: ProductShape, plan: Plan, limit: int) -> int:
    """Most stages of the ring that fit."""
    step = shared_bytes(product, plan, 1) - shared_bytes(product, plan, 0)
    return min(MAX_STAGES, (limit - shared_bytes(product, plan, 0)) // step)


def max_clusters(cluster: int, n_processors: int) -> int:
    """Clusters that run at the same time: those of four and eight do not fill every group of multiprocessors."""
    return n_processors // cluster if cluster < 4 else n_processors // cluster // 2 * 2


def plan_us(
    product: ProductShape, plan: Plan, n_processors: int, exchange_us: float = EXCHANGE_US, turns_us: float = 0.0
) -> float:
    """About how long it takes, fitted to an H200: the slower of memory and one block, then what does not overlap.
    exchange_us: what doubling the cluster costs; turns_us: what taking tiles in turn does."""
    chunks, rows = chunks_of(plan), tile_rows(plan)
    n_blocks = plan.n_clusters * plan.cluster
    n_passes = math.ceil(tiles_of(product, plan) / plan.n_clusters)
    n_units = math.ceil(math.ceil(product.k / CHUNK / chunks) / plan.cluster)
    x_mb, w_mb = (128e-6 * n_units * chunks * height for height in (1 << (product.m - 1).bit_length(), rows))
    block_mb = n_passes * (w_mb if plan.resident else w_mb + x_mb)
    dram_us = product.n * product.k * 2e-6 / DRAM_MB_US * (1 + UNEVEN * max(0.0, 1 - n_blocks / n_processors))
    lost = SMALL_RING * product.tokens if is_crowded(plan) else 0.0
    lost += 0.0 if plan.resident else TRAVEL * 64 / rows
    ring_bytes = plan.n_stages * chunks * 128 * rows
    lost += SHORT_RING * max(0.0, 1 - ring_bytes / RING_BYTES)
    exchange_us *= (1 + product.tokens / 32) * math.log2(plan.cluster)
    staging_us = x_mb / STAGING_MB_US if plan.resident else 0.0
    store_us = 0.0 if plan.turns else n_passes * rows * product.tokens / STORE_ELEMENTS_US
    lost_us = exchange_us + staging_us + store_us + GROUP_US * plan.groups + (turns_us if plan.turns else 0.0)
    return max(dram_us, block_mb / BLOCK_MB_US) * (1 + lost) + lost_us


def is_crowded(plan: Plan) -> bool:
    """Its clusters are only all placed if two blocks share a multiprocessor."""
    return plan.cluster >= 4 and plan.n_clusters * plan.cluster > LARGE_CLUSTER_BLOCKS
