"""How experts are cut for the kernels of csrc/cuda/moe_few.cu and moe_wide.cu. Plain arithmetic, no torch.

Invariant: a plan depends on shapes only, never on the routing, so that a captured graph stays valid.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

CHUNK = 64
"""Columns of floating w that one 128-byte row of shared memory holds."""
N_SCALES, MAX_SCALES_BYTES = (4, 2), 40 << 10
"""Items whose scales a block has room for: the first unless that is too much, or takes the room of a larger stage."""
FEW_TOKENS, CODES_TOKENS = (8, 16, 24), (8, 16)
"""Pairs of a tile, where w is floating and where it is in codes. Of 24 the ring has four stages only, so that a second
tile of an expert costs more: they are for a mean of at most MAX_MEAN."""
MAX_MEAN = 14.0
FEW_SPREAD = 2.0
"""Pairs of an expert beyond the mean that a tile is for, in standard deviations of uniform routing."""
MAX_FEW_PAIRS = 4096
"""Each block of the kernel for few rows sorts all pairs for itself."""
MAX_LONE = 32
"""Experts of a lone token, which one warp lists."""
LONE_CHUNKS = 4
"""In a stage, for a lone token: each of the warps has several stages of its own."""
CHUNKS = (8, 6, 4, 2)
MIN_CODES_RING_BYTES = 48 << 10
"""Beside scales; memory that answers in 0.8 microseconds needs 27 KB on their way."""
WARPS, MAX_STAGES = 8, 32
CHUNK_BYTES, MAX_STAGE_BYTES, MIN_RING_BYTES = 16 * 128, 16 << 10, 64 << 10
MAX_BYTES = 232_448
"""Shared memory of a Hopper block."""
WIDE_TOKENS, WIDE_MEAN = (64, 128, 160), 40
"""Rows of x in a tile of the kernel for many rows; more than the least from so many pairs an expert on."""
TALL_MEAN = (112, 152)
"""Pairs an expert, from and below, of which 128 would leave a second, small tile to many experts."""
MAX_EXPERTS, MAX_CHOSEN = 1024, 32


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class CodesShape:
    """How both matrices of an expert are kept."""

    kind: int = 0
    """QUIRE_CODES of csrc/cuda/moe/codes.h; 0: floating."""
    group: int = 0
    """Inputs that share a scale; 0: all."""
    zeros: bool = False
    """There are zero points."""

    @property
    def is_rounded(self) -> bool:
        """Rows are multiplied in e4m3 too."""
        return self.kind == 1

    @property
    def width(self) -> int:
        """Columns in 128 bytes of a row."""
        return 256 if self.kind >= 3 else 128 if self.kind else CHUNK

    def part_bytes(self, n_rows: int, columns: int) -> int:
        """Shared memory for the scales of so many rows: `scales_part_bytes` in csrc/cuda/moe/few_lists.h."""
        size = 4 if self.kind <= 2 else 1 if self.kind == 4 else 2 * (1 + self.zeros)
        row = (math.ceil(columns / self.group) if self.group else 1) * size
        if self.kind <= 2 and self.group:
            return math.ceil(row / 16) * 16
        return n_rows * (row if row % 16 else row + 16)


FLOATING = CodesShape()


class CodesCut(NamedTuple):
    """How w in codes is cut: 64 columns for a warp at a time, which has all rows of an item or half of them."""

    up: tuple[int, int]
    """Columns of a stage, and blocks of 16 rows of an item; here and of the second product."""
    down: tuple[int, int]
    min_stages: int
    """Of a lone token each of the warps has its own."""


FP4 = 4
CODES_CUTS = (
    CodesCut((1024, 4), (1024, 4), 3), CodesCut((512, 4), (512, 4), 3), CodesCut((256, 4), (256, 4), 3),
    CodesCut((512, 2), (256, 4), 3),
)  # fmt: skip
LONE_CODES_CUTS = (
    CodesCut((512, 4), (512, 1), WARPS), CodesCut((512, 2), (512, 1), 2 * WARPS), CodesCut((256, 2), (512, 1), WARPS),
)  # fmt: skip
"""The first that fits: a turn of a stage costs, however small it is. The very first is for FP4 alone: 2 to 4 % less
time there, and with INT4 none. A lone token's first is for shapes where no block has more to do because items are
larger, see `_is_uneven`."""
TALL, N_PROCESSORS = 1.6, 132
"""Time of a stage of twice the rows to one; and of a GPU whose blocks are counted, an H100 or H200."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The shape of one call of `experts`."""

    n: int
    """Tokens."""
    n_chosen: int
    n_experts: int
    hidden: int
    inner: int
    codes: CodesShape = FLOATING
    n_shared: int = 0
    """Last ones of n_chosen and of n_experts, which every token has."""

    @property
    def n_pairs(self) -> int:
        """Of a token and an expert that it chose."""
        return self.n * self.n_chosen


@dataclasses.dataclass(frozen=True, slots=True)
class FewPlan:
    """The kernel for few rows: what it is compiled for, and the stages of its ring."""

    tokens: int
    """Pairs of a tile."""
    lone: bool
    """There is one token, and the sum over its experts is part of the second product."""
    up_chunks: int
    """Of 128 bytes of a row, in a stage; here and for the second product."""
    down_chunks: int
    n_stages: int
    blocks: tuple[int, int]
    """Of 16 rows of w, in an item of each product."""
    n_scales: int = 0
    """Items whose scales there is room for."""
    shared: bool = False
    """There are experts that every token has."""

    @property
    def stage_bytes(self) -> int:
        up, down = self.blocks
        return max(self.up_chunks * up, self.down_chunks * down) * CHUNK_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class WidePlan:
    """Both products by the kernel for many rows."""

    tokens: int
    """Rows of x in a tile, at most."""

    def n_tiles(self, shape: ExpertsShape) -> int:
        """At most, whatever the routing."""
        return min(shape.n_pairs, shape.n_experts + shape.n_pairs // self.tokens)


@functools.cache
def plan(shape: ExpertsShape) -> FewPlan | WidePlan:
    """The kernel for few rows while tiles of an expert's pairs fit beside a ring, then the one for many."""
    return few_plan(shape) or wide_plan(shape)


def few_plan(shape: ExpertsShape) -> FewPlan | None:
    """None: too many pairs, or the rows of x of a tile leave no room for a ring."""
    mean = shape.n_pairs / shape.n_experts
    wanted = min(shape.n, mean + FEW_SPREAD * math.sqrt(mean))
    sizes = CODES_TOKENS if shape.codes.kind else FEW_TOKENS
    tokens = next((each for each in sizes if each >= wanted), None)
    if tokens is None or shape.n_pairs > MAX_FEW_PAIRS or (tokens == FEW_TOKENS[-1] and mean > MAX_MEAN):
        return None
    lone = shape.n == 1 and shape.n_chosen <= MAX_LONE
    if shape.codes.kind:
        cuts = _codes_plans(shape, tokens, lone)
    else:
        chunks = (LONE_CHUNKS, LONE_CHUNKS) if lone else (_chunks(shape.hidden, 1), _chunks(shape.inner, 2))
        cuts = iter([(FewPlan(tokens, lone, *chunks, 0, (1, 1 if lone else 2), shared=shape.n_shared > 0), 1)])
    for made, min_stages in cuts:
        rest = MAX_BYTES - shared_bytes(shape, made)
        n_stages = min(MAX_STAGES, rest // made.stage_bytes)
        if rest >= (MIN_CODES_RING_BYTES if shape.codes.kind else MIN_RING_BYTES) and n_stages >= min_stages:
            return dataclasses.replace(made, n_stages=n_stages)
    return None


def _codes_plans(shape: ExpertsShape, tokens: int, lone: bool) -> Iterator[tuple[FewPlan, int]]:
    """Without stages yet, and how many each needs: the fastest first."""
    cuts = LONE_CODES_CUTS[_is_uneven(shape) :] if lone else CODES_CUTS[shape.codes.kind != FP4 :]
    for cut in cuts:
        for n_scales in N_SCALES:
            made = codes_plan(shape, tokens, lone, cut, n_scales)
            if n_scales == N_SCALES[-1] or n_scales * _scales_bytes(shape, made) <= MAX_SCALES_BYTES:
                yield made, cut.min_stages


def _is_uneven(shape: ExpertsShape) -> bool:
    """Items of four blocks in the first product of a lone token make the last round of all processors too empty."""
    low, tall = (math.ceil(shape.n_pairs * shape.inner / (8 * blocks) / N_PROCESSORS) for blocks in (2, 4))
    return tall * TALL > low


def codes_plan(shape: ExpertsShape, tokens: int, lone: bool, cut: CodesCut, n_scales: int) -> FewPlan:
    """Without stages yet."""
    (up, up_blocks), (down, down_blocks) = cut.up, cut.down
    width = shape.codes.width
    return FewPlan(tokens, lone, up // width, down // width, 0, (up_blocks, down_blocks), n_scales)


def wide_plan(shape: ExpertsShape) -> WidePlan:
    """For any number of pairs."""
    mean, tokens = shape.n_pairs / shape.n_experts, wide_tokens(shape.codes)
    if TALL_MEAN[0] <= mean < TALL_MEAN[1]:
        return WidePlan(tokens[-1])
    return WidePlan(tokens[mean >= WIDE_MEAN])


def wide_tokens(codes: CodesShape) -> tuple[int, ...]:
    """Of the tiles that there are: what makes numbers of codes, or scales sums, takes the registers of the tallest."""
    return WIDE_TOKENS[:-1] if codes.kind else WIDE_TOKENS


def _chunks(k: int, blocks: int) -> int:
    """In a stage, for items of so many blocks of 16 rows: of the fewest stages for an item those with the least room
    left empty."""
    n = k // CHUNK
    fitting = [each for each in CHUNKS if each * blocks * CHUNK_BYTES <= MAX_STAGE_BYTES]
    return min(fitting, key=lambda each: (math.ceil(n / each), each))


def shared_bytes(shape: ExpertsShape, made: FewPlan) -> int:
    """Shared memory of a block: `Layout` in csrc/cuda/moe/few_lists.h."""
    n_tiles = min(shape.n_pairs, shape.n_experts + shape.n_pairs // made.tokens)
    rows, inner, counts = made.tokens, shape.inner, WARPS * shape.n_experts * 4
    if made.lone:
        n_tiles, rows, inner, counts = shape.n_pairs, 1, shape.inner * shape.n_pairs, 0
    total = made.n_stages * made.stage_bytes + rows * (max(shape.hidden, inner) * 2 + 16)
    total += 2 * WARPS * made.tokens * 64 * _own_blocks(shape, made) + 2 * MAX_STAGES * 8
    if shape.codes.kind:
        total += made.n_scales * _scales_bytes(shape, made) + N_SCALES[0] * 16
    if shape.codes.is_rounded:
        of_x, of_h = (math.ceil(k / 128) if shape.codes.group else 1 for k in (shape.hidden, shape.inner))
        numbers = max(of_x * made.tokens, of_h * (shape.n_pairs if made.lone else made.tokens))
        total += math.ceil(4 * numbers / 16) * 16
    return total + (shape.n_experts + 1) * 4 + counts + n_tiles * 12 + shape.n_pairs * 4


def _own_blocks(shape: ExpertsShape, made: FewPlan) -> int:
    """Of 16 rows, that a warp sums: in codes a part of an item's where fewer warps than all have its columns."""
    if not shape.codes.kind:
        return max(made.blocks)
    both = zip((made.up_chunks, made.down_chunks), made.blocks, strict=True)
    return max(min(chunks * shape.codes.width, 64 * WARPS) * blocks // (64 * WARPS) for chunks, blocks in both)


def _scales_bytes(shape: ExpertsShape, made: FewPlan) -> int:
    """Of an item of the product that has more of them."""
    up, down = made.blocks
    parts = shape.n_pairs if made.lone else 1
    return max(2 * shape.codes.part_bytes(8 * up, shape.hidden), parts * shape.codes.part_bytes(16 * down, shape.inner))
