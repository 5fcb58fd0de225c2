"""An hour, on a virtual clock, at twice what the engine can do: it goes on at its full rate and grows nowhere."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque

import pytest

from quire.control import history
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.errors import QueueFull
from quire.core.events import FinishReason
from quire.core.plan import StepPlan
from quire.core.request import Request, Terms
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams

STEP_S = 0.5
PATIENCE_S = 20.0


class Rig:
    """A scheduler whose steps all take `STEP_S`, two in flight."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        config = SchedulerConfig(
            n_pages=129, page_size=8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, max_num_waiting=24
        )
        self.scheduler = Scheduler(config, self.clock)
        self.rng = random.Random(11)
        self.n_refused = self.n_late = self.n_sent = 0
        self.n_done: deque[float] = deque()
        """When each request that was served to its end ended."""
        self._in_flight: deque[StepPlan] = deque()

    def send(self) -> None:
        """One request of 4 to 40 tokens and 2 to 12 of output."""
        self.n_sent += 1
        rng = self.rng
        prompt, n_out = [rng.randrange(500) for _ in range(rng.randint(4, 40))], rng.randint(2, 12)
        request = Request(
            request_id=str(self.n_sent), prompt_token_ids=prompt, params=SamplingParams(), max_tokens=n_out, seed=0,
            terms=Terms(queue_limit_s=PATIENCE_S, user=str(rng.randrange(1000))),
        )  # fmt: skip
        try:
            self.scheduler.submit(request)
        except QueueFull:
            self.n_refused += 1

    def step(self) -> None:
        self.n_late += len(self.scheduler.expire())
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(plan)
        self.clock.advance(STEP_S)
        if self._in_flight and (plan is None or len(self._in_flight) == 2):
            oldest = self._in_flight.popleft()
            n_wants = sum(oldest.spans.wants)
            for delta in self.scheduler.commit(StepResult(oldest.step, [5] * n_wants, [1] * n_wants)):
                if delta.finish_reason is FinishReason.LENGTH:
                    self.n_done.append(self.clock.now_s())


def peak_rate() -> float:
    """Requests a second when there is always just enough to do."""
    rig = Rig()
    for _ in range(1500):
        while len(rig.scheduler.live.requests) < 12:
            rig.send()
        rig.step()
    return len(rig.n_done) / rig.clock.now_s()


def test_o08_an_hour_at_twice_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_STEPS", 1024)  # a ring, which is full before the first look at the memory
    peak = peak_rate()
    rig, next_s, sizes = Rig(), 0.0, []
    while rig.clock.now_s() < 3600:
        while next_s <= rig.clock.now_s():
            rig.send()
            next_s += rig.rng.expovariate(2 * peak)
        rig.step()
        if not int(rig.clock.now_s() / STEP_S) % 1800:
            rig.n_done = deque(len(rig.n_done) * [0.0])  # equal floats take no memory
            gc.collect()
            sizes.append(sys.getallocatedblocks())
        scheduler = rig.scheduler
        live = scheduler.live
        assert len(live.waiting) + len(live.running) == len(live.requests) <= 32  # a slot that is free now is room too
    assert len(rig.n_done) / 3600 >= 0.9 * peak, "goodput falls under overload"
    assert rig.n_refused + rig.n_late > 0.35 * rig.n_sent, "that was no overload"
    assert len(sizes) == 4 and sizes[-1] - sizes[0] < 2000, "something grows"
    assert len(scheduler.live.deadlines._heap) < 600
    while scheduler.has_work():
        rig.step()
    stats = scheduler.stats()
    assert stats.n_pages_free == stats.n_pages and not scheduler.live.requests
