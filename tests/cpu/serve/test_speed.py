"""The rate of a counter that is read now and then."""

from __future__ import annotations

from quire.serve.ops.speed import WINDOW_S, Speed


def test_rate_over_the_window() -> None:
    speed = Speed()
    assert speed.tokens_per_s(100, 5.0) == 0
    assert speed.tokens_per_s(150, 6.0) == 50
    for i in range(1, 400):
        rate = speed.tokens_per_s(150 + i * 10, 6.0 + i * 0.1)
    assert abs(rate - 100) < 1e-6
    assert speed.tokens_per_s(150 + 3990, 6.0 + 39.9 + 3 * WINDOW_S) < 100 / 3
    assert speed.tokens_per_s(150 + 3990, 6.0 + 39.9 + 5 * WINDOW_S) == 0


def test_clocks_and_counters_that_misbehave() -> None:
    speed = Speed()
    for n_tokens, time_s in ((10, 1.0), (20, 1.0), (5, 2.0), (6, 1.5), (6, 1.5), (7, 100.0)):
        assert speed.tokens_per_s(n_tokens, time_s) >= 0
