"""Many replicas behind a router: who steps next, and when the router hears of it.

Owns the one order of time over all clocks. Invariants: a request is routed by what had happened by its arrival; a
replica's step is made only when it begins before the next arrival.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence

from quire.bench.simulate.record import Outcome, Run
from quire.bench.simulate.replica import Replica
from quire.bench.simulate.requests import SimRequest
from quire.bench.simulate.router import Router
from quire.engine.garbage import gc_kept_quiet


class Fleet:
    """See the module."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self._replicas, self._router = replicas, router
        self._steps: list[tuple[float, int]] = []
        """(clock, replica) of those that have work."""
        self._busy = [False] * len(replicas)
        self._news: list[tuple[float, int, bool]] = []
        """(time, request, whether it has ended), which the router is yet to hear."""

    def run(self, requests: Sequence[SimRequest]) -> Run:
        """All of them, to the last token."""
        begin_s, outcomes = time.process_time(), []
        with gc_kept_quiet():
            for number, request in enumerate(requests):
                self._advance(request.arrival_s)
                outcomes.append(self._submit(number, request))
            self._advance(math.inf)
        return Run(outcomes, [replica.log for replica in self._replicas], time.process_time() - begin_s)

    def _submit(self, number: int, request: SimRequest) -> Outcome:
        outcome = Outcome(number, request.arrival_s, request.input_len, request.output_len)
        prompt = request.prompt(number)
        index = outcome.replica = self._router.choose(number, prompt)
        replica = self._replicas[index]
        replica.submit(outcome, request, prompt)
        if outcome.refusal:
            self._router.tell(number, ended=True)
        elif not self._busy[index]:
            self._busy[index] = True
            heapq.heappush(self._steps, (replica.now_s, index))
        return outcome

    def _advance(self, until_s: float) -> None:
        """Make all steps that begin before `until_s`."""
        steps, replicas = self._steps, self._replicas
        while steps and steps[0][0] < until_s:
            index = steps[0][1]
            replica = replicas[index]
            for outcome in replica.step():
                heapq.heappush(self._news, (replica.now_s, outcome.number, outcome.is_done or bool(outcome.refusal)))
            if replica.has_work():
                heapq.heapreplace(steps, (replica.now_s, index))
            else:
                heapq.heappop(steps)
                self._busy[index] = False
        while self._news and self._news[0][0] <= until_s:
            _, number, ended = heapq.heappop(self._news)
            self._router.tell(number, ended=ended)
