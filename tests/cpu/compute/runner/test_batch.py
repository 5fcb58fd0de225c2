"""A plan's hints about shared prefixes as spans of the flat batch."""

from __future__ import annotations

from quire.compute.runner.batch import flatten, shared_spans
from quire.core.plan import Spans


def test_slots_become_spans_and_keys_end_before_every_row() -> None:
    spans = Spans([5, 2, 9, 7], [100, 64, 63, 0], [1, 1, 1, 30], [0] * 4, [True] * 4)
    found = shared_spans(flatten(spans), [([2, 5], 4), ([9, 5], 4)], 16)
    assert [(list(group.spans), group.n_keys) for group in found] == [([1, 0], 64), ([2, 0], 48)]
