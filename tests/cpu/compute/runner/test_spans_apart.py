"""Spans whose rows are alone: every row keeps its slot and its keys, and prompts and outputs are told apart."""

from __future__ import annotations

import numpy as np

from quire.compute.runner.spans_apart import ApartSpans, Room, apart


def rows(indptr: np.ndarray, kv_lens: np.ndarray, slots: np.ndarray) -> list[tuple[int, int]]:
    """(slot, keys that it sees) of each row."""
    return [
        (int(slot), int(end) - (int(last) - 1 - row))
        for first, last, end, slot in zip(indptr[:-1], indptr[1:], kv_lens, slots, strict=True)
        for row in range(int(first), int(last))
    ]


def random_step(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    n = int(rng.integers(1, 9))
    lengths = rng.integers(0, 9, n)
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    kv_lens = (lengths + rng.integers(0, 20, n)).astype(np.int32)
    return indptr, kv_lens, rng.permutation(n).astype(np.int32), rng.integers(1, 25, n).astype(np.int32)


def test_rows_stay_and_each_is_computed_in_one_way() -> None:
    rng = np.random.default_rng(0)
    n_few = n_many = 0
    for _ in range(200):
        indptr, kv_lens, slots, prompt_lens = random_step(rng)
        spans = apart(indptr, kv_lens, slots, prompt_lens)
        assert rows(spans.q_indptr, spans.kv_lens, spans.slots) == rows(indptr, kv_lens, slots)
        prompt_of = dict(zip(slots.tolist(), prompt_lens.tolist(), strict=True))
        for i, is_few in enumerate(spans.few):
            positions = [
                n - 1 for _, n in rows(spans.q_indptr[i : i + 2], spans.kv_lens[i : i + 1], spans.slots[i : i + 1])
            ]
            assert positions, "no span is empty"
            is_output = [position >= prompt_of[int(spans.slots[i])] for position in positions]
            assert is_output == [True] if is_few else not any(is_output)
            n_few, n_many = n_few + is_few, n_many + (not is_few)
        assert len(set(spans.slots[~spans.few].tolist())) == (~spans.few).sum(), "a prompt's part is one span"
    assert n_few > 100 and n_many > 100


def test_room_counts_what_is_cut() -> None:
    def spans(lengths: list[int], kv_lens: list[int], few: list[bool]) -> ApartSpans:
        indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return ApartSpans(indptr, np.asarray(kv_lens, np.int32), np.arange(len(lengths), dtype=np.int32), np.array(few))

    step = spans([1, 33, 1], [50, 9000, 7], [True, False, False])
    assert Room(1, 5).holds(step, 4)  # 33 tokens of 4 heads are two tiles, their keys two pieces; a prompt's last token
    assert not Room(1, 4).holds(step, 4) and not Room(0, 5).holds(step, 4)
    assert not Room(9, 9).holds(spans([1], [(1 << 20) + 1], [True]), 4)
