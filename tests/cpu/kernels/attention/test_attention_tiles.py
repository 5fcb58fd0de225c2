"""The GPU work list covers every token and key once, fits its buffers, and costs the host little."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.attention.tiles import KEY_STEP, Shape, TileList, cut


def random_step(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Shape]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 40))
    lengths = rng.choice([0, 1, 1, 1, 3, 200, 900], n)
    q_indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    kv_lens = (lengths + rng.choice([0, 5, 3000, 20000], n)).astype(np.int32)
    group = int(rng.choice([1, 2, 3, 4, 7, 8]))
    shape = Shape(group, int(rng.choice([1, 2, 8])), 16, 128, int(rng.choice([8, 528])))
    return q_indptr, kv_lens, rng.permutation(n).astype(np.int32), shape


def brute_force(q_indptr: np.ndarray, kv_lens: np.ndarray, work: TileList) -> None:
    """Each row of the batch: its tiles' key ranges are disjoint, in order, and cover 0 .. position at least."""
    covered = np.zeros(int(q_indptr[-1]), np.int64)
    for q_row, n_tokens, _, position, begin, end, _, _ in work.tiles[np.argsort(work.tiles[:, 4], kind="stable")]:
        rows = slice(q_row, q_row + n_tokens)
        assert begin % KEY_STEP == 0
        assert (covered[rows] == begin).all()
        assert end > begin
        assert n_tokens > 0
        covered[rows] = end
        span = np.searchsorted(q_indptr, q_row, side="right") - 1
        assert position == kv_lens[span] - (q_indptr[span + 1] - q_row)
    for span in range(len(kv_lens)):
        rows = np.arange(q_indptr[span], q_indptr[span + 1])
        positions = kv_lens[span] - (q_indptr[span + 1] - rows)
        assert (covered[rows] > positions).all()
        assert (covered[rows] <= kv_lens[span]).all()


@pytest.mark.parametrize("seed", range(30))
def test_every_key_once(seed: int) -> None:
    q_indptr, kv_lens, slots, shape = random_step(seed)
    work = cut(q_indptr, kv_lens, slots, shape)
    brute_force(q_indptr, kv_lens, work)
    small, large = work.tiles[: work.n_small], work.tiles[work.n_small :]
    assert (small[:, 1] * shape.group <= shape.small_rows).all()
    assert (large[:, 1] * shape.group <= shape.large_rows).all()
    for part in (small, large):
        assert (np.diff(part[:, 5] - part[:, 4]) <= 0).all()


@pytest.mark.parametrize("seed", range(30))
def test_merges_name_each_partial_row_once(seed: int) -> None:
    q_indptr, kv_lens, slots, shape = random_step(seed)
    work = cut(q_indptr, kv_lens, slots, shape)
    split = work.tiles[work.tiles[:, 6] >= 0]
    written = np.concatenate([line[6] + np.arange(line[1] * shape.group) for line in split] or [np.zeros(0, int)])
    read = np.concatenate([first + step * np.arange(n) for first, step, n, _ in work.merges] or [np.zeros(0, int)])
    assert sorted(written) == sorted(read) == list(range(work.n_partial_rows))
    packed = {row * shape.group + i for row, n in split[:, :2] for i in range(n * shape.group)}
    assert sorted(work.merges[:, 3]) == sorted(packed)


def test_decode_fits_the_room_that_buffers_reserve() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 70))
        shape = Shape(4, int(rng.choice([1, 8])), 16, 128, int(rng.choice([16, 528])))
        kv_lens = (rng.pareto(1, n) * 300 + 1).clip(max=100_000).astype(np.int32)
        work = cut(np.arange(n + 1, dtype=np.int32), kv_lens, np.arange(n, dtype=np.int32), shape)
        assert len(work.tiles) <= n + shape.most_splits
        assert work.n_partial_rows <= (n + shape.most_splits) * shape.small_rows


def test_one_long_sequence_fills_the_chip() -> None:
    shape = Shape(4, 8, 16, 128, 528)
    work = cut(np.array([0, 1], np.int32), np.array([16384], np.int32), np.zeros(1, np.int32), shape)
    assert len(work.tiles) == 64
    full = cut(np.arange(257, dtype=np.int32), np.full(256, 1000, np.int32), np.arange(256, dtype=np.int32), shape)
    assert len(full.tiles) == 256
    assert len(full.merges) == 0
