"""How a product of many rows is cut into tiles and slices for csrc/cuda/gemm_wide.cu. Plain arithmetic, no torch.

Invariant: a plan depends on shapes only, so that the same shapes give the same bits and a captured graph stays valid.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

from quire.kernels.gemm.plan import CHUNK, Plan, ProductShape

TILE_ROWS = 128
"""Rows of w in a tile; with SiLU half of them are gate, half are up."""
SPLITS = {64: (1, 2, 4, 8), 96: (1, 2, 3, 4, 6), 128: (1, 2, 4, 8), 192: (1, 2, 3, 4, 6), 256: (1, 2, 4, 8)}
"""Tokens of a tile → into how many slices of K it can be cut."""
MAX_TOKENS = 256
TURNED_ROWS, TURNED_TOKENS = 192, 128
"""Of a tile where rows of w are the columns of the matrix instruction."""
MIN_UNITS = 2
"""Chunks of K that a slice has at least."""
L2_BYTES = 16 << 20
"""So much of x may stay in L2 while all of w passes."""
START_US, EXCHANGE_US, STORE_US = 3.4, 1.0, 0.38
"""For a launch; for handing over and for storing the sums of a tile of 128 tokens."""
MULTIPLY_US, INGEST_KB_US, L2_KB_US, DRAM_MB_US, GFLOP_US = 0.24, 95.0, 9700.0, 4.3, 0.76
"""A chunk of a tile of 128 tokens; what reaches one multiprocessor and all of them from L2; what comes from memory;
and what the power limit allows."""
SHARPNESS = 6.0
"""Of the maximum of what overlaps: the second slowest costs something, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class WidePlan:
    """What is compiled (first two, and `rows`) and what is passed at a launch."""

    tokens: int
    """Of a tile."""
    split: int
    """Blocks that share a tile, each with a slice of K."""
    n_teams: int
    """Teams of `split` blocks, which take tile after tile."""
    n_together: int
    """Tiles of tokens that are taken together over all rows of w."""
    rows: int = TILE_ROWS
    """Of w in a tile. Other than 128: tokens and rows of w change places in the matrix instruction."""

    @property
    def sums_size(self) -> int:
        """Elements (float32) through which blocks hand over their sums."""
        return 0 if self.split == 1 else self.n_teams * self.split * TILE_ROWS * self.tokens


@functools.cache
def wide_plan(
    product: ProductShape, n_processors: int, *, alone: bool = False, max_tokens: int = MAX_TOKENS
) -> WidePlan:
    """The cheapest plan by the model of `wide_us`, its tiles of at most max_tokens. alone: K is not split."""
    made_all = (made for made in _candidates(product, n_processors) if made.tokens <= max_tokens)
    found = (made for made in made_all if made.split == 1 or not alone)
    return min(found, key=lambda one: wide_us(product, one, n_processors))


def takes_adapters(product: ProductShape, plan: Plan | WidePlan) -> bool:
    """Whether the kernel of the plan can add what adapters do (csrc/cuda/gemm/wide_adapters.h)."""
    return isinstance(plan, WidePlan) and plan.tokens == min(SPLITS) and product.m <= plan.tokens and not product.norm


def turned_plan(product: ProductShape, n_processors: int) -> WidePlan:
    """Tiles of 192 rows of w by 128 tokens, which are rows of the matrix instruction: where scales differ by token."""
    tiles = n_tiles(product, TURNED_TOKENS, TURNED_ROWS)
    n_teams = math.ceil(tiles / math.ceil(tiles / n_processors))
    return WidePlan(TURNED_TOKENS, 1, n_teams, _together(product, TURNED_TOKENS), TURNED_ROWS)


def multiplied(product: ProductShape, plan: WidePlan) -> float:
    """What the busiest block multiplies, in tiles of 128 x 128 with all columns."""
    n_passes = math.ceil(n_tiles(product, plan.tokens, plan.rows) / plan.n_teams)
    return n_passes * plan.tokens * plan.rows / (128 * 128 * plan.split)


def n_tiles(product: ProductShape, tokens: int, rows: int = TILE_ROWS) -> int:
    """Tiles of `rows` rows of w by `tokens` tokens."""
    return math.ceil(product.n / rows) * math.ceil(product.m / tokens)


def _together(product: ProductShape, tokens: int) -> int:
    return max(1, min(math.ceil(product.m / tokens), L2_BYTES // (tokens * product.k * 2)))


def _candidates(product: ProductShape, n_processors: int) -> Iterator[WidePlan]:
    for tokens, splits in SPLITS.items():
        tiles = n_tiles(product, tokens)
        together = _together(product, tokens)
        for split in splits:
            if split == 1:
                n_passes = math.ceil(tiles / n_processors)
                yield WidePlan(tokens, 1, math.ceil(tiles / n_passes), together)
            elif tiles * split <= n_processors and product.k // CHUNK >= split * MIN_UNITS:
                yield WidePlan(tokens, split, tiles, together)


def wide_us(product: ProductShape, plan: WidePlan, n_processors: int) -> float:
    """About how long it takes, fitted to an H200 at full clock."""
    tiles = n_tiles(product, plan.tokens, plan.rows)
    n_passes = math.ceil(tiles / plan.n_teams)
    n_units = product.k / CHUNK / plan.split * n_passes
    stage_kb = (plan.rows + plan.tokens) * CHUNK * 2 / 1024
    share = plan.tokens * plan.rows / (128 * TILE_ROWS)
    parts = (
        n_units * MULTIPLY_US * share,
        n_units * stage_kb / INGEST_KB_US,
        tiles * product.k / CHUNK * stage_kb / L2_KB_US,
        product.n * product.k * 2e-6 / DRAM_MB_US,
    )
    power_us = tiles * plan.rows * plan.tokens * product.k * 2e-9 / GFLOP_US
    work_us: float = max(power_us, sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS))
    exchange_us: float = 0.0 if plan.split == 1 else EXCHANGE_US * (0.3 + share**1.5)
    return START_US + work_us + exchange_us + n_passes * STORE_US * share / plan.split
