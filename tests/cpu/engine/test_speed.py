"""The rate of a counter that is read about once a second."""

from __future__ import annotations

import pytest

from quire.engine.speed import WINDOW_S, Speed


def test_rate_over_the_window() -> None:
    speed = Speed(5.0)
    assert speed.tokens_per_s(5.0) == 0
    speed.read(50, 6.0)
    assert speed.tokens_per_s(6.0) == 50 and speed.tokens_per_s(7.0) == 25
    for i in range(1, 400):
        speed.read(50 + i * 10, 6.0 + i * 0.1)
    assert speed.tokens_per_s(45.9) == pytest.approx(100)


def test_a_burst_counts_for_ten_seconds_however_seldom_anybody_asks() -> None:
    speed = Speed(0.0)
    for second in range(60):
        speed.read(0, float(second))
    speed.read(1500, 60.0)
    assert speed.tokens_per_s(60.0) == pytest.approx(150)
    for second in range(61, 80):
        speed.read(1500, float(second))
        assert speed.tokens_per_s(float(second)) == pytest.approx(150 if second < 60 + WINDOW_S else 0)


def test_clocks_and_counters_that_misbehave() -> None:
    speed = Speed(3.0)
    for n_tokens, time_s in ((10, 1.0), (20, 1.0), (5, 2.0), (6, 1.5), (6, 1.5), (7, 100.0)):
        speed.read(n_tokens, time_s)
        assert speed.tokens_per_s(time_s) >= 0 and speed.tokens_per_s(0.0) >= 0
