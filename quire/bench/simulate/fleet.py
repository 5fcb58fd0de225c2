"""Many replicas behind a router: who steps next, and when the router hears of it.

Owns the one order of time over all clocks. Invariants: a request is routed by what had happened by its arrival; a
replica's step is made only when it begins before the next arrival; what replicas say of their prefix trees they say as
often as the server's do.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from typing import Final

from quire.bench.simulate.record import Outcome, Run
from quire.bench.simulate.replica import Replica
from quire.bench.simulate.requests import SimRequest
from quire.bench.simulate.router import Router
from quire.core.events import PrefixUpdate
from quire.engine.garbage import gc_kept_quiet

UPDATE_S: Final = 0.25
"""As `engine/process.py` has it for figures."""


class Fleet:
    """See the module."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self._replicas, self._router = replicas, router
        self._steps: list[tuple[float, int]] = []
        """(time, replica) of steps to come; of each replica the one at `_due` counts."""
        self._due = [math.inf] * len(replicas)
        self._news: list[tuple[float, int, bool]] = []
        """(time, request, whether it has ended), which the router is yet to hear."""
        self._updates: list[tuple[float, int, PrefixUpdate]] = []
        """(time, replica, what it says then of its prefix trees), likewise."""
        self._next_update_s = [0.0] * len(replicas)
        """When each says something again, if it is not in the middle of a step."""
        self._resting: list[tuple[float, int]] = []
        """(that time, replica) of those that came to rest before it."""
        if router.follows:
            for replica in replicas:
                replica.follow()

    def run(self, requests: Sequence[SimRequest]) -> Run:
        """All of them, to the last token."""
        begin_s, outcomes = time.process_time(), []
        with gc_kept_quiet():
            for number, request in enumerate(requests):
                self._advance(request.arrival_s)
                outcomes.append(self._submit(number, request))
            for index, replica in enumerate(self._replicas):
                replica.close()
                self._plan(index)
            self._advance(math.inf)
        return Run(outcomes, [replica.log for replica in self._replicas], time.process_time() - begin_s)

    def _submit(self, number: int, request: SimRequest) -> Outcome:
        outcome = Outcome(number, request.arrival_s, request.input_len, request.output_len)
        prompt = request.prompt(number)
        outcome.replica = self._router.choose(number, prompt)
        self._replicas[outcome.replica].submit(outcome, request, prompt)
        if outcome.refusal:
            self._router.tell(number, ended=True)
        self._plan(outcome.replica)
        return outcome

    def _plan(self, index: int) -> None:
        """Enter the next step of a replica, if that is not known."""
        due_s = self._replicas[index].next_s
        if due_s != self._due[index]:
            self._due[index] = due_s
            heapq.heappush(self._steps, (due_s, index))

    def _advance(self, until_s: float) -> None:
        """Make all steps that begin before `until_s`, and tell the router what had happened by then."""
        steps, replicas, due, news = self._steps, self._replicas, self._due, self._news
        follows = self._router.follows
        while steps and steps[0][0] < until_s:
            begin_s, index = steps[0]
            if begin_s != due[index]:
                heapq.heappop(steps)
                continue
            replica = replicas[index]
            if follows and self._next_update_s[index] <= begin_s:
                self._say(index, self._next_update_s[index])
            for outcome in replica.step():
                heapq.heappush(news, (replica.now_s, outcome.number, outcome.is_done or bool(outcome.refusal)))
            due[index] = due_s = replica.next_s
            if follows and due_s >= self._next_update_s[index]:
                self._stepped(index)
            if due_s < math.inf:
                heapq.heapreplace(steps, (due_s, index))
            else:
                heapq.heappop(steps)
        self._tell(until_s)

    def _stepped(self, index: int) -> None:
        """A replica that is to say something now, or has come to rest, ended a step."""
        replica = self._replicas[index]
        if replica.now_s >= self._next_update_s[index]:
            self._say(index, replica.now_s)
        if replica.next_s == math.inf:
            heapq.heappush(self._resting, (self._next_update_s[index], index))

    def _say(self, index: int, time_s: float) -> None:
        """A replica says what its prefix trees hold at this time."""
        heapq.heappush(self._updates, (time_s, index, self._replicas[index].update()))
        self._next_update_s[index] = time_s + UPDATE_S

    def _tell(self, until_s: float) -> None:
        """Tell the router what had happened by then; at one time the end of a request comes before what is said."""
        news, updates, resting = self._news, self._updates, self._resting
        while resting and resting[0][0] <= until_s < math.inf:
            time_s, index = heapq.heappop(resting)
            if time_s == self._next_update_s[index]:
                self._say(index, time_s)
        while news or updates:
            if not news or (updates and updates[0][0] < news[0][0]):
                if updates[0][0] > until_s:
                    return
                _, index, update = heapq.heappop(updates)
                self._router.hear(index, update)
            elif news[0][0] <= until_s:
                _, number, ended = heapq.heappop(news)
                self._router.tell(number, ended=ended)
            else:
                return
