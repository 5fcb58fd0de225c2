"""A plan's spans, and its hints about shared prefixes, as a flat batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from quire.compute.runner.batch_builder import build_batch, shared_spans
from quire.core.plan import Spans


def test_slots_become_spans_and_keys_end_before_every_row() -> None:
    spans = Spans([5, 2, 9, 7], [100, 64, 63, 0], [1, 1, 1, 30], [0] * 4, [True] * 4)
    found = shared_spans(build_batch(spans), [([2, 5], 4), ([9, 5], 4)], 16)
    assert [(list(group.spans), group.n_keys) for group in found] == [([1, 0], 64), ([2, 0], 48)]


def test_masks_lie_in_the_order_of_spans_and_their_drafts() -> None:
    """A prompt that wants no token, a span without a mask, one with two drafts and a mask, one with a mask alone."""
    wants = [False, True, True, True, True]
    spans = Spans([3, 5, 2, 9, 7], [0, 100, 64, 63, 50], [4, 2, 3, 1, 1], [0, 1, 2, 0, 0], wants)
    batch = build_batch(spans, [2, 4])
    assert batch.mask_lines.tolist() == [-1, -1, 0, 1, 2, -1, 3] and batch.n_masks == 4
    assert batch.sampled_slots[batch.mask_lines >= 0].tolist() == [2, 2, 2, 7]
    assert batch.sampled_positions[batch.mask_lines >= 0].tolist() == [65, 66, 67, 51]


def test_a_step_that_only_decodes_is_as_any_other() -> None:
    spans = Spans([5, 2, 9], [100, 64, 0], [1, 1, 1], [0] * 3, [True] * 3)
    short, general = (dataclasses.asdict(build_batch(spans, masked)) for masked in ([], [1]))
    assert short.pop("mask_lines").tolist() == [-1, -1, -1] and general.pop("mask_lines").tolist() == [-1, 0, -1]
    assert short.pop("trees") is None and general.pop("trees") is None
    for name, values in general.items():
        assert np.array_equal(short[name], values) and short[name].dtype == values.dtype, name
