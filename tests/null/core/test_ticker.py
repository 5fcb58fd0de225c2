"""Progress in the log: nothing of what is quick, a line a period of what is long, none once it is over."""

from __future__ import annotations

import logging
import threading

import pytest

from quire.core import ticker
from quire.core.units import format_bytes


def test_quick_work_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    before = set(threading.enumerate())
    with ticker.ticking("loading weights", 100) as one:
        one.advance(100)
    assert not caplog.records and not set(threading.enumerate()) - before


def test_long_work_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it stands in one call."""
    said: list[str] = []
    third = threading.Event()

    def note(form: str, line: str) -> None:
        said.append(line)
        if len(said) >= 3:
            third.set()

    monkeypatch.setattr(ticker, "PERIOD_S", 0.05)
    monkeypatch.setattr(ticker.logger, "info", note)
    with ticker.ticking("loading weights", 4 << 30, format_bytes) as one:
        one.advance(1 << 30)
        assert third.wait(60)
    n_said = len(said)
    assert all(line.startswith("loading weights: 1.00 GiB of 4.00 GiB, ") for line in said[1:])
    with ticker.ticking("building kernels"):
        while len(said) <= n_said:
            third.wait(0.01)
            threading.Event().wait(0.01)
    assert said[n_said].startswith("building kernels: ") and " of " not in said[n_said]


def test_an_error_ends_it_too() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="x"), ticker.ticking("loading weights"):
        raise ValueError("x")
    assert threading.active_count() == before
