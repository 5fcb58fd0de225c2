"""The monitor of the event loop: what it calls held, and what not."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable

import pytest

from quire.serve.ops import loop_monitor
from quire.serve.ops.loop_monitor import LIMIT_S, PERIOD_S, REST_S, Lag, LoopMonitor

DATA = [float(i) for i in range(200_000)]


def watched(work: Callable[[], None], settle_s: float = 0.2) -> list[Lag]:
    """Lags of a loop on which `work` runs once."""
    lags: list[Lag] = []

    async def run() -> None:
        monitor = LoopMonitor(lags.append)
        monitor.start()
        monitor.enter()
        await asyncio.sleep(4 * PERIOD_S)
        work()
        await asyncio.sleep(settle_s)
        monitor.leave()
        monitor.close()

    asyncio.run(run())
    return lags


def compute(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def worst(lags: list[Lag]) -> Lag:
    return max(lags, key=lambda lag: lag.late_s)


def test_own_work_is_measured_by_its_cpu_time_and_warned_of_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    lag = worst(watched(lambda: compute(0.3)))
    assert 0.3 - 2 * PERIOD_S < lag.loop_s <= lag.late_s and lag.held_s == lag.loop_s
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1 and "the event loop was held for" in lines[0]
    assert "test_loop_monitor.py:" in lines[0], lines


def test_waiting_is_not_work(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that sleeps is late like one that has no core: that alone is no warning."""
    lag = worst(watched(lambda: time.sleep(0.3)))
    assert lag.late_s > 0.3 - 2 * PERIOD_S
    assert lag.held_s < LIMIT_S and not caplog.records


def test_a_thread_that_keeps_the_interpreter_is_told_apart(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call into C that does not let go of the interpreter holds the loop as if it ran there."""
    monkeypatch.setattr(loop_monitor, "delayed_s", lambda before, now: 0.0)  # the machine may be busy
    lists = [DATA] * 300

    def lines_of_one() -> list[str]:
        ended = threading.Event()

        def keep() -> None:
            sum(map(sum, lists))
            ended.wait(60)

        caplog.clear()
        lag = worst(watched(lambda: threading.Thread(target=keep, name="keeper").start(), 3.0))
        ended.set()
        assert lag.interpreter_s > LIMIT_S > lag.loop_s
        return [record.getMessage() for record in caplog.records]

    tries = [lines_of_one()]
    while not any("; keeper computed for " in line for line in tries[-1]):
        assert len(tries) < 8 and "nobody looked in time" in str(tries[-1]), tries  # which a busy machine may say
        tries.append(lines_of_one())


def test_a_thread_that_keeps_the_interpreter_without_a_core_is_no_fault(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for it is counted, but what it lasted for want of a core is the machine's doing."""
    monkeypatch.setattr(loop_monitor, "delayed_s", lambda before, now: 60.0)
    lists = [DATA] * 300
    lag = worst(watched(lambda: threading.Thread(target=lambda: sum(map(sum, lists))).start(), 3.0))
    assert lag.interpreter_s > LIMIT_S > lag.loop_s and not caplog.records


def test_delays_of_threads_that_began_since_count_whole() -> None:
    before, now = {1: (5.0, 1.0), 2: (1.0, 9.0)}, {1: (6.0, 1.5), 3: (0.5, 0.25)}
    assert loop_monitor.delayed_s(before, now) == 0.75


def test_a_thread_that_lets_go_of_the_interpreter_is_no_matter() -> None:
    data = b"x" * (100 << 20)

    def work() -> None:
        threading.Thread(target=lambda: hashlib.sha512(data).digest()).start()

    assert all(lag.held_s < LIMIT_S for lag in watched(work, 0.5))


def test_a_closed_loop_ends_the_thread() -> None:
    async def run() -> None:
        LoopMonitor(lambda lag: None).start()

    others = set(threading.enumerate())  # such as those of servers of other tests
    asyncio.run(run())
    deadline_s = time.monotonic() + 60
    while any(thread.name == "quire-loop-monitor" for thread in set(threading.enumerate()) - others):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_server_without_requests_is_watched_seldom_and_a_request_wakes_the_watch() -> None:
    lags: list[Lag] = []

    async def run() -> None:
        monitor = LoopMonitor(lags.append)
        monitor.start()
        await asyncio.sleep(2 * REST_S + 0.1)
        assert len(lags) <= 4, "it rests"
        monitor.enter()
        await asyncio.sleep(4 * PERIOD_S)
        compute(0.3)
        await asyncio.sleep(0.1)
        assert worst(lags).loop_s > 0.3 - 2 * PERIOD_S
        monitor.close()

    asyncio.run(run())
