"""The life of a rank that is not rank 0: load its part, then one message of the ring after the other.

Owns the loop. Does not own the worker, nor what is said.
"""

from __future__ import annotations

import logging
import os
import pathlib

from quire.compute.expert_balancer import ExpertBalancer
from quire.compute.runner.runner import Launched
from quire.compute.worker import Worker
from quire.config.model import read_arch
from quire.core.errors import EngineError
from quire.core.plan import StepMasks, StepPlan
from quire.engine.fit import check_fit
from quire.engine.ranks.adapters import RankAdapters
from quire.engine.ranks.done import DoneSteps
from quire.engine.ranks.process import Pulse, tell_failure
from quire.engine.ranks.results import ResultWriter
from quire.engine.ranks.ring import IDLE, ORDERED, READY, STEPPING, RankMemory, RingReader
from quire.engine.ranks.start import RankStart
from quire.engine.ranks.wire import (
    Allocate,
    BalanceExperts,
    DropAdapter,
    ForgetAdapter,
    KeepAdapter,
    Measure,
    Order,
    ReadAdapter,
    SleepRanks,
    Stop,
    TakeTokens,
    TellLoads,
    WakeRanks,
    decode,
)
from quire.engine.workers import fit_case, make_balancer, make_worker

logger = logging.getLogger("quire.engine")


def run_rank(start: RankStart, memory: RankMemory, pulse: Pulse) -> None:
    """Until told to leave. Raises whatever goes wrong: the rank cannot go on then."""
    if not start.is_server:
        logger.setLevel(logging.WARNING)
    folder = pathlib.Path(start.folder)
    arch = read_arch(folder, start.config.hf_overrides)
    made = make_worker(
        start.config, folder, arch, is_server=start.is_server, rank=start.rank, meeting_point=start.meeting_point
    )
    worker, meeting, pulse.calls = made.worker, made.meeting, made.meeting
    assert meeting is not None
    memory.set_state(start.rank, READY)
    meeting.join()
    check_fit(fit_case(start.config, made))
    worker.load()
    results = None
    if start.results_fd >= 0:

        def fail(error: Exception) -> None:
            tell_failure(start, error)
            os._exit(1)

        results = ResultWriter(start.results_fd, start.results_bell_fd, fail)
    pulse.done = done = DoneSteps(worker.platform.device.mark)
    adapters = RankAdapters(worker.adapters, start.rank, start.meeting_point)
    reader = RingReader(memory, start.rank, start.bell_fd)
    rank = Rank(worker, done, results, make_balancer(start.config, made), adapters)
    while True:
        memory.set_state(start.rank, IDLE)
        said = decode(reader.get())
        memory.set_state(start.rank, STEPPING if isinstance(said, (StepPlan, StepMasks)) else ORDERED)
        if isinstance(said, Stop):
            break
        for check in worker.platform.device.checks:
            check()
        rank.do(said)
    rank.close()
    meeting.close()


class Rank:
    """What a worker is told."""

    def __init__(
        self,
        worker: Worker,
        done: DoneSteps,
        results: ResultWriter | None,
        balancer: ExpertBalancer | None,
        adapters: RankAdapters,
    ) -> None:
        """results: where it is this rank that says them; balancer: where experts move."""
        self._worker, self._done, self._results = worker, done, results
        self._balancer, self._adapters = balancer, adapters
        self._unmasked: Launched | None = None

    def do(self, said: StepPlan | StepMasks | Order) -> None:
        """Begin a step, end one, or carry out an order."""
        match said:
            case StepPlan():
                launched = self._worker.launch(said)
                self._done.launched()
                self._unmasked = launched if said.masked else None
                if self._results is not None and self._unmasked is None:
                    self._results.put(launched)
            case StepMasks(step):
                if self._unmasked is None:
                    raise EngineError(f"masks came for step {step}, which waits for none")
                self._unmasked.mask(said)
                if self._results is not None:
                    self._results.put(self._unmasked)
                self._unmasked = None
            case Allocate(allocation):
                self._worker.allocate(allocation)
            case Measure():
                self._worker.draft_costs()
            case SleepRanks(level):
                self._unmasked = None
                if self._balancer is not None:
                    self._balancer.rest()
                self._worker.sleep(level)
            case WakeRanks():
                self._worker.wake()
            case TakeTokens():
                self._worker.runner.take_all()
            case BalanceExperts(stage):
                if self._balancer is None:
                    raise EngineError("experts are to move, but this rank was not told so at its start")
                self._balancer.do(stage)
            case ReadAdapter() | KeepAdapter() | ForgetAdapter() | DropAdapter():
                self._adapters.do(said)
            case TellLoads():
                if self._results is not None:
                    self._results.put_loads(self._worker.expert_loads())

    def close(self) -> None:
        """Give up all memory, and before it a step whose masks will not come: it holds its captured choice, for which
        NCCL waits when a group ends."""
        self._unmasked = None
        self._worker.close()
