"""How experts are cut for the Hopper kernels, without a GPU: what a block holds, how many tiles there are, refusals."""

from __future__ import annotations

import random

import pytest
import torch
from coded_experts import CODINGS

from quire.config.experts import Gating
from quire.kernels.invariance import rows_alone
from quire.kernels.moe import CodedMatrices, Codes, hopper
from quire.kernels.moe.plan import (
    MAX_BYTES,
    MAX_STAGES,
    MIN_RING_BYTES,
    WARPS,
    CodesShape,
    ExpertsShape,
    FewPlan,
    WidePlan,
    few_plan,
    plan,
    shared_bytes,
    wide_plan,
)

QWEN3_30B = (8, 128, 2048, 768)


def test_few_tokens_stream_and_many_are_grouped() -> None:
    for n, expected in ((1, 8), (32, 8), (64, 8), (128, 16), (192, 24)):
        cut = plan(ExpertsShape(n, *QWEN3_30B))
        assert isinstance(cut, FewPlan) and (cut.tokens, cut.lone) == (expected, n == 1)
    assert [wide_plan(ExpertsShape(n, *QWEN3_30B)).tokens for n in (256, 512, 1024, 2048, 8192)] == [
        64, 64, 128, 160, 128,
    ]  # fmt: skip
    assert few_plan(ExpertsShape(256, *QWEN3_30B)) is None
    assert few_plan(ExpertsShape(192, *QWEN3_30B, INT4)) is None, "codes have tiles of 16 at most"


@pytest.mark.parametrize("seed", range(3))
def test_a_block_has_room_and_each_warp_a_stage(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        n_experts = draw.choice([1, 8, 60, 128, 512, 1024])
        sizes = (64 * draw.randint(1, 120), 64 * draw.randint(1, 240))
        shape = ExpertsShape(draw.choice([1, 2, 7, 64, 300]), draw.randint(1, min(32, n_experts)), n_experts, *sizes)
        cut = few_plan(shape)
        if cut is not None:
            assert shared_bytes(shape, cut) <= MAX_BYTES
            assert cut.n_stages >= WARPS or cut.n_stages * cut.stage_bytes > MIN_RING_BYTES - cut.stage_bytes
            assert not cut.lone or cut.n_stages >= WARPS


@pytest.mark.parametrize("seed", range(3))
def test_there_is_room_for_the_tiles_of_any_routing(seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(50):
        n, n_experts = int(torch.randint(1, 400, ())), int(torch.randint(4, 40, ()))
        shape = ExpertsShape(n, 4, n_experts, 64, 64)
        scores = torch.rand(n, n_experts) * torch.rand(n_experts) ** 4
        counts = scores.argsort(1)[:, :4].flatten().bincount()
        for tokens in (64, 128):
            assert int((counts + tokens - 1).div(tokens, rounding_mode="floor").sum()) <= WidePlan(tokens).n_tiles(
                shape
            )


INT4, INT4_ZEROS, MXFP4, E4M3 = CodesShape(3, 128), CodesShape(3, 32, True), CodesShape(4, 32), CodesShape(1, 128)


@pytest.mark.parametrize(
    ("n", "sizes", "codes", "up", "down"),
    [  # columns of a stage and blocks of an item
        (1, (4, 32, 2880, 2880), MXFP4, (512, 4), (512, 1)),
        (1, QWEN3_30B, MXFP4, (512, 2), (512, 1)),  # 192 items of 32 rows would be two rounds of 132
        (1, (4, 32, 2880, 2880), E4M3, (256, 2), (512, 1)),  # each warp has two stages
        (5, (4, 32, 2880, 2880), MXFP4, (1024, 4), (1024, 4)),
        (5, (4, 32, 2880, 2880), INT4_ZEROS, (512, 4), (512, 4)),
        (5, (4, 32, 2880, 2880), E4M3, (512, 4), (512, 4)),
        (60, (4, 32, 2880, 2880), MXFP4, (512, 4), (512, 4)),
        (60, (4, 32, 2880, 2880), E4M3, (256, 4), (256, 4)),  # beside 16 rows of x and their sums
        (8, QWEN3_30B, INT4, (512, 4), (512, 4)),
        (128, QWEN3_30B, INT4_ZEROS, (512, 4), (512, 4)),
        (8, (8, 384, 7168, 2048), INT4, (512, 4), (512, 4)),
        (64, (8, 384, 7168, 2048), INT4, (256, 4), (256, 4)),
        (64, (8, 384, 7168, 2048), MXFP4, (512, 2), (256, 4)),
    ],
)
def test_codes_are_read_in_the_largest_stages_that_fit(
    n: int, sizes: tuple[int, ...], codes: CodesShape, up: tuple[int, int], down: tuple[int, int]
) -> None:
    cut = plan(ExpertsShape(n, *sizes, codes))
    assert isinstance(cut, FewPlan)
    found = [(cut.up_chunks * codes.width, cut.blocks[0]), (cut.down_chunks * codes.width, cut.blocks[1])]
    assert found == [up, down]


@pytest.mark.parametrize("seed", range(3))
def test_a_block_has_room_for_codes(seed: int) -> None:
    """And whatever has room for the smallest stages is not for the kernel of many rows."""
    draw, kinds = random.Random(seed), (INT4, INT4_ZEROS, MXFP4, E4M3, CodesShape(2), CodesShape(3))
    for _ in range(300):
        n_experts = draw.choice([8, 60, 128, 384])
        sizes = (64 * draw.randint(1, 120), 64 * draw.randint(1, 120))
        n, chosen = draw.choice([1, 2, 7, 64, 128]), draw.randint(1, 8)
        shape = ExpertsShape(n, chosen, n_experts, *sizes, draw.choice(kinds))
        cut = few_plan(shape)
        if cut is None:
            continue
        assert shared_bytes(shape, cut) <= MAX_BYTES
        assert cut.n_stages >= (WARPS if cut.lone else 3)
        assert cut.n_stages == MAX_STAGES or shared_bytes(shape, cut) + cut.stage_bytes > MAX_BYTES
        assert shape.inner % (8 * cut.blocks[0]) == shape.hidden % (16 * cut.blocks[1]) == 0, "items are whole"


def test_scales_that_need_much_room_get_smaller_items_or_less_of_it() -> None:
    for sizes, codes, expected in (
        ((8, 384, 7168, 2048), CodesShape(3, 32), ((2, 4), 2)),
        ((8, 128, 2048, 768), INT4_ZEROS, ((4, 4), 2)),
        ((8, 128, 2048, 768), MXFP4, ((4, 4), 4)),
    ):
        shape = ExpertsShape(8, *sizes, codes)
        cut = plan(shape)
        assert isinstance(cut, FewPlan) and (cut.blocks, cut.n_scales) == expected
        assert shared_bytes(shape, cut) <= MAX_BYTES


def test_what_is_not_for_these_kernels_says_why() -> None:
    shape = ExpertsShape(4, 2, 8, 128, 64)
    assert hopper.static_obstacle(shape, torch.bfloat16) is None
    assert "bfloat16 or float16" in str(hopper.static_obstacle(shape, torch.float32))
    assert "multiples of 64" in str(hopper.static_obstacle(ExpertsShape(4, 2, 8, 128, 96), torch.bfloat16))
    assert "at most 32 of 1024" in str(hopper.static_obstacle(ExpertsShape(4, 40, 64, 128, 64), torch.bfloat16))
    x, ids, weights = torch.zeros(4, 128), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
    up, down = torch.zeros(8, 128, 128), torch.zeros(8, 128, 64)
    coded = CodedMatrices(Codes.FP4, 64, torch.zeros(8, 128, 8).int(), torch.zeros(8, 128, 2, dtype=torch.uint8), 32)
    assert "kept in two ways" in str(hopper.prepare(x, ids, weights, up, coded, Gating()))
    nvfp4 = CODINGS[7].matrices(8, 128, 64, torch.bfloat16)
    assert "experts are in NVFP4" in str(hopper.static_obstacle(hopper.shape_of(ids, nvfp4), torch.bfloat16))
    with rows_alone():
        assert "number of rows" in str(hopper.prepare(x, ids, weights, up, down, Gating()))
    assert "elements apart" in str(hopper.prepare(torch.zeros(4, 132)[:, :128], ids, weights, up, down, Gating()))
