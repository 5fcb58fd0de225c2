"""What stands around the products of experts (moe_rows.cu) without a GPU: emulated on the host.

Not shown: that blocks at once count in the same place.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulation import emulated_library, emulated_sources

from quire.kernels.moe import hopper

DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = emulated_sources(tmp_path_factory.mktemp("rows"))
    return emulated_library(folder / "moe_rows.cu", "rows", *hopper._definitions(DTYPE))


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def tiles_of(expert: int, first: int, n: int, tile_slots: int) -> list[list[int]]:
    """As few as there can be, of about as many slots each, in eights."""
    n_tiles = -(-n // tile_slots)
    each = -(-n // (8 * n_tiles)) * 8 if n else 1
    found = [[expert, first + i, min(each, n - i), 0] for i in range(0, n, each)]
    assert len(found) == n_tiles and all(0 < one[2] <= tile_slots for one in found)
    return found


@pytest.mark.parametrize("start_step", [1, 4])
@pytest.mark.parametrize("tile_slots", [8, 64])
def test_pairs_are_sorted_into_tiles_whose_experts_start_at_a_step(
    library: ctypes.CDLL, start_step: int, tile_slots: int
) -> None:
    """70 experts: more than a warp has lanes; some have none, one has many, and some pairs have no expert."""
    n_experts, n_pairs = 70, 2500  # of two blocks
    ids = torch.randint(-1, n_experts + 1, (n_pairs,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    ids[ids % 5 == 3] = 2
    for _ in range(2):  # the counts are zeros again behind the first
        ranks, starts = torch.full((n_pairs,), -7, dtype=torch.int32), torch.full((n_experts,), -7, dtype=torch.int32)
        tiles, n_tiles = torch.full((n_pairs, 4), -7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        memory = addresses(ids, ranks, starts, tiles, n_tiles)
        args = hopper._SortArgs(*memory, n_pairs, n_experts, tile_slots, start_step)
        assert library.quire_moe_sort(ctypes.byref(args), None) == 0
        expected, first = [], 0
        for expert in range(n_experts):
            own = ranks[ids == expert]
            assert sorted(own.tolist()) == list(range(len(own)))
            assert starts[expert] == first and first % start_step == 0
            expected += tiles_of(expert, first, len(own), tile_slots)
            first += len(own) + -len(own) % start_step
        assert tiles[: int(n_tiles)].tolist() == expected
        assert (tiles[int(n_tiles) :] == -7).all() and (ranks[(ids < 0) | (ids >= n_experts)] == -7).all()


def test_slots_know_their_tokens(library: ctypes.CDLL) -> None:
    """Slots are those of the order of experts, and tiles are listed."""
    n, k, n_experts, tile_slots = 210, 6, 70, 16  # several turns of a block's threads
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, n_experts + 1, (n, k), generator=generator, dtype=torch.int32)
    ids[ids % 5 == 3] = 2  # twice in some tokens
    slots, starts = torch.full((n * k,), -7, dtype=torch.int32), torch.full((n_experts,), -7, dtype=torch.int32)
    tiles, n_tiles = torch.full((n * k, 4), -7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    tokens = torch.full((n * k,), -7, dtype=torch.int32)
    sort = hopper._SortArgs(*addresses(ids, slots, starts, tiles, n_tiles), n * k, n_experts, tile_slots, 1)
    place = hopper._PlaceArgs(*addresses(ids, starts, slots, tokens), n, k, n_experts)
    assert library.quire_moe_sort(ctypes.byref(sort), None) == library.quire_moe_place(ctypes.byref(place), None) == 0
    flat = ids.flatten()
    real = ((flat >= 0) & (flat < n_experts)).nonzero()[:, 0]
    order = real[flat[real].argsort(stable=True)]
    n_real = len(order)
    assert sorted(slots[order].tolist()) == list(range(n_real)) and (slots.sum() - slots[order].sum()) % 7 == 0
    assert torch.equal(tokens[slots[order].long()], (order // k).int()) and (tokens[n_real:] == -7).all()
    assert torch.equal(flat[order][slots[order].argsort()], flat[order]), "experts in their order"
    counts, expected = torch.bincount(flat[real], minlength=n_experts).tolist(), []
    for expert, many in enumerate(counts):
        first = sum(counts[:expert])
        expected += tiles_of(expert, first, many, tile_slots)
    assert tiles[: int(n_tiles)].tolist() == expected


@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("n_shared", [0, 2])
def test_sums_have_the_shared_parts_with_weight_1(library: ctypes.CDLL, n_shared: int, has_slots: bool) -> None:
    n, routed, n_experts, h = 5, 3, 8, 1064  # of more cells than a block has threads
    generator, k = torch.Generator().manual_seed(2), routed + n_shared
    ids = torch.randint(0, n_experts, (n, routed), generator=generator, dtype=torch.int32)
    ids[1, 0], ids[3] = -1, n_experts
    weights = torch.rand(n, routed, generator=generator)
    slots = torch.randperm(n * k, generator=generator).int()
    x = torch.randn(n * k, h, generator=generator).to(DTYPE)
    residual, y = torch.randn(n, h + 8, generator=generator).to(DTYPE)[:, :h], torch.empty(n, h + 16, dtype=DTYPE)
    memory = addresses(x, ids, weights, slots if has_slots else None, residual, y)
    args = hopper._SumArgs(*memory, residual.stride(0), y.stride(0), n, k, n_experts, h, n_shared)
    assert library.quire_moe_sum(ctypes.byref(args), None) == 0
    is_real = torch.cat([(ids >= 0) & (ids < n_experts), torch.ones(n, n_shared, dtype=torch.bool)], 1)
    factors = torch.cat([weights, torch.ones(n, n_shared)], 1).double() * is_real
    rows = (x[slots.long()] if has_slots else x).double().view(n, k, h)
    expected = residual.double() + (rows * factors[:, :, None]).sum(1)
    torch.testing.assert_close(y[:, :h].double(), expected, rtol=2**-8, atol=1e-5)
