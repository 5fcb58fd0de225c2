"""The loop in which control and compute meet: schedule, submit, wait for the step before, commit.

Owns the steps in flight. Does not own policy (`control`), tensors (`compute`), text or sockets.
Invariants: results are committed in the order in which their plans were made; whatever a step raises ends every
sequence with an error delta and leaves the loop able to go on, until `MAX_FAILED_STEPS` in a row have failed; only what
did not fit the device's memory is tried again, in smaller steps.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.control.plan_builder import PlanBuilder
from quire.control.scheduler import Scheduler
from quire.core.clock import Clock
from quire.core.commands import Cancel, CancelSeq, Submit
from quire.core.errors import EngineAsleep, EngineError, QuireError, RequestError, SleepFailed
from quire.core.events import EngineStats, SeqDelta
from quire.core.failure import Code, Failure
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.request import Request
from quire.core.result import StepResult
from quire.engine.adapters import READ_WAIT_S, AdapterRegistry
from quire.engine.command_reader import refusals
from quire.engine.executors.executor import Executor, OtherRanks, RanksLost, is_out_of_memory
from quire.engine.expert_load import ExpertLoad
from quire.engine.grammars.manager import StructuredOutput, Unmasked
from quire.engine.sleep import ASLEEP, AsleepExecutor, SleepMode
from quire.engine.step_record import HostTimes, StepRecord, record_of

T = TypeVar("T")
logger = logging.getLogger("quire.engine")

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine gives up: the device has an error that stays."""
COMPILE_WAIT_S = 0.005
"""How long an engine with nothing else to do waits for a grammar before it looks for commands again."""
WAIT_SLICE_S = 0.25
"""`on_wait` is called this often while a step computes (not on CUDA, whose wait cannot be divided;
`OtherRanks.on_late` is)."""


InFlight = tuple[StepPlan, concurrent.futures.Future[StepResult], HostTimes]


class EngineCore:
    """One scheduler, one executor, at most `depth` steps between them."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        depth: int,
        grammars: StructuredOutput | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.on_step: Callable[[StepRecord], None] | None = None
        self.on_wait: Callable[[], None] | None = None
        self.grammars = grammars or StructuredOutput(None)
        self.grammars.on_wait, self.grammars.clock = self._waits, clock
        n_drafts = scheduler.config.num_speculative_tokens
        self.grammars.most_foretold = 1 + n_drafts if n_drafts else 0
        self.on_plan: Callable[[Sequence[PlanBuilder]], None] | None = None
        """Gets the steps in flight before the newest of them is submitted."""
        self._masked_through = -1
        """The last step that was given its masks."""
        self._depth = depth
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._n_failed = 0
        self.sleep_mode: SleepMode[Any] | None = None
        """What can be given up in sleep; None: nothing."""
        self.free_memory: Callable[[], None] | None = None
        """Gives up all that the executor's worker holds, when nothing runs any more."""
        self.ranks: OtherRanks | None = None
        """Those beside the one that the executor has in this process."""
        self.adapters = AdapterRegistry()
        self.expert_load: ExpertLoad | None = None
        """Of a model with experts."""
        self._committed: list[SeqDelta] = []
        """What sequences gained in this step of the loop, while something may fail yet."""
        self._owed: list[SeqDelta] = []
        """Ends of sequences that a failed command took with it, for the next step to return."""

    def step(self) -> list[SeqDelta]:
        """Keep the device busy, then take in the oldest finished step. Returns what sequences gained. EngineError once
        `MAX_FAILED_STEPS` in a row have failed, or a rank is lost."""
        self.check()
        if self.grammars.n_compiling or self.adapters.n_waiting:
            self._queue_late()
        owed, self._owed = self._owed, []
        if self.is_asleep:
            return owed
        try:
            owed += self._expire()
            deltas, record = self._advance()
        except RanksLost:
            raise
        except Exception as error:
            owed += self._gained()
            return owed + (self._retry(error) if is_out_of_memory(error) else self._fail(error))
        if record is not None and self.on_step is not None:
            self.on_step(record)
        return owed + deltas

    def _expire(self) -> list[SeqDelta]:
        """Ends of sequences whose time is over."""
        deltas = self.scheduler.expire()
        for delta in deltas:
            self.grammars.drop_seq(delta.request_id, delta.index)
        return deltas

    def check(self) -> None:
        """EngineError if no step can be expected to succeed any more."""
        if self._n_failed >= MAX_FAILED_STEPS:
            raise EngineError(
                f"{self._n_failed} steps in a row failed: the device or the engine is broken, see the log; restart it"
            )

    def _advance(self) -> tuple[list[SeqDelta], StepRecord | None]:
        now_s = self.clock.now_s
        times = HostTimes(now_s())
        if self.grammars.most_foretold and self.grammars.n_live:
            self._mask_oldest()  # the next plan says what must follow
        plan = self.scheduler.schedule()  # while masks are made
        if plan is not None:
            self.executor.prepare(plan)
        self._mask_oldest()
        if plan is not None:
            if self.on_plan is not None:
                self.on_plan(self.scheduler.in_flight)
            times.submit_s = now_s()
            self._in_flight.append((plan, self.executor.submit(plan), times))
            times.submitted_s = now_s()
            self._mask_oldest()
        if not self._in_flight or (plan is not None and len(self._in_flight) < self._depth):
            return self._gained(), None
        plan, future, times = self._in_flight.popleft()
        times.wait_s = now_s()
        result = self._wait(future)
        times.commit_s = now_s()
        deltas = self.scheduler.commit(result)
        self._committed += deltas
        if self.grammars.n_live:
            self.grammars.follow(deltas, self._unmasked())
        times.committed_s = now_s()
        self._n_failed = 0
        return self._gained(), record_of(self.scheduler.live, plan, result, times) if self.on_step is not None else None

    def _gained(self) -> list[SeqDelta]:
        gained, self._committed = self._committed, []
        return gained

    def _mask_oldest(self) -> None:
        """Give the oldest step in flight, before which all is committed, the masks that it waits for."""
        unmasked = self._unmasked()
        if unmasked is not None:
            masks = self.grammars.masks(unmasked)
            self._masked_through = unmasked.plan.step  # not if they failed: then the step still waits
            self.executor.mask(masks)
        self._committed += self.grammars.ended(self.scheduler)

    def _unmasked(self) -> Unmasked | None:
        """The oldest plan in flight, if it waits for masks."""
        plan = self._in_flight[0][0] if self._in_flight else None
        if plan is None or not plan.masked or plan.step <= self._masked_through:
            return None
        return Unmasked(plan, self.scheduler.in_flight[0].seqs, self._drafts_of(plan))

    def _drafts_of(self, plan: StepPlan) -> list[SpanDrafts]:
        """Of each masked span of the newest plan; empty if none has any. The device knows them when it begins."""
        return self._wait(self.executor.drafts()) if plan.masks_drafts else []

    def _queue_late(self) -> None:
        """Queue requests whose adapter is read, or whose grammar is compiled, by now."""
        is_idle = not self._in_flight and not self.scheduler.has_work()
        if self.adapters.n_waiting:
            self._queue(self.adapters.ready(READ_WAIT_S if is_idle else 0.0), self._take)
        if self.grammars.n_compiling:
            self._queue(self.grammars.ready(COMPILE_WAIT_S if is_idle else 0.0), self._submit)

    def _queue(self, ready: list[tuple[Request, QuireError | None]], take: Callable[[Request], None]) -> None:
        for request, error in ready:
            try:
                if error is not None:
                    raise error
                take(request)
            except QuireError as refusal:
                self._owed += refusals(request, refusal)

    def _take(self, request: Request) -> None:
        """A request whose adapter is on the host, if it has one."""
        if request.is_constrained:
            self.grammars.admit(request)
        else:
            self._submit(request)

    def _submit(self, request: Request) -> None:
        try:
            self._check_awake()
            self.scheduler.submit(request)
        except RequestError:
            self.grammars.drop(request.request_id)
            raise

    def _wait(self, future: concurrent.futures.Future[T]) -> T:
        while not future.done():
            try:
                return future.result(WAIT_SLICE_S)
            except TimeoutError:
                self._waits()
        return future.result()

    def _waits(self) -> None:
        if self.on_wait is not None:
            self.on_wait()

    def _fail(self, error: Exception) -> list[SeqDelta]:
        """A whole step failed: nothing in flight can be trusted, so every sequence ends with an error."""
        logger.error("step failed, all requests end with an error", exc_info=error)
        self._n_failed += 1
        self.grammars.clear()
        self._drain()
        return self.scheduler.fail_all(Failure(Code.ENGINE_ERROR, "the engine failed while computing a step"))

    def _retry(self, error: Exception) -> list[SeqDelta]:
        """A step found too little memory: every sequence computes again, in smaller steps; returns ends of those that
        do not fit even so."""
        logger.warning("a step did not fit the memory of the device; the next ones are smaller: %s", error)
        self._drain()
        deltas = self.scheduler.retry_all()
        self._n_failed += 1 if deltas else 0
        for delta in deltas:
            self.grammars.drop_seq(delta.request_id, delta.index)
        return deltas

    def _drain(self) -> None:
        """Wait for the steps in flight, whatever becomes of them."""
        while self._in_flight:
            plan, future, _ = self._in_flight.popleft()
            try:
                if plan.masked and plan.step > self._masked_through:
                    n_masks = len(plan.masked) + sum(map(len, self._drafts_of(plan)))
                    self.executor.mask(StepMasks(plan.step, b"\xff" * (4 * n_masks)))
                self._wait(future)
            except Exception as later:
                logger.debug("a step in flight failed too: %s", later)

    def handle(self, command: Submit | Cancel | CancelSeq) -> None:
        """Apply one command. RequestError if a submission is refused, EngineError if taking it failed."""
        try:
            self._apply(command)
        except RequestError:
            raise
        except Exception as error:
            lost = command.request.request_id if isinstance(command, Submit) else None
            if lost is None or lost in self.scheduler.live.requests:  # it is half-applied
                self._owed += self._fail(error)
            if lost is not None:
                self._owed = [delta for delta in self._owed if delta.request_id != lost]
                raise EngineError("the engine failed while taking this request") from error

    def _apply(self, command: Submit | Cancel | CancelSeq) -> None:
        match command:
            case Submit(request):
                self._check_awake()
                if self.adapters.admit(request):
                    self._take(request)
            case Cancel(request_ids):
                for request_id in request_ids:
                    self.scheduler.cancel(request_id)
                    self.grammars.drop(request_id)
                    self.adapters.drop(request_id)
            case CancelSeq(request_id, index):
                self.scheduler.cancel_seq(request_id, index)
                self.grammars.drop_seq(request_id, index)

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and the end of `wake_up`."""
        return self.sleep_mode is not None and self.sleep_mode.is_asleep

    def sleep(self, level: int) -> None:
        """End every sequence with an error, which the next step returns, and give memory back.

        level: 1 keeps the weights in the host's memory, 2 gives them up too. SleepFailed where nothing can be given up.
        """
        if self.sleep_mode is None:
            raise SleepFailed("this engine was not started with enable_sleep_mode, or holds no memory")
        self.grammars.clear()
        self._drain()
        self._owed += self.scheduler.fail_all(Failure(Code.ENGINE_ASLEEP, ASLEEP))
        self._owed += self.adapters.refuse_all(EngineAsleep(ASLEEP))
        self.executor.shutdown()
        self.executor = AsleepExecutor()
        if self.expert_load is not None:
            self.expert_load.rest()
        self._beside(functools.partial(self.sleep_mode.sleep, level))

    def wake_up(self) -> None:
        """Bring back what `sleep` gave up. SleepFailed if it cannot be had; the engine sleeps on then."""
        if self.sleep_mode is not None and self.sleep_mode.is_asleep:
            self.executor = self._beside(self.sleep_mode.wake_up)
            if self.expert_load is not None:
                self.expert_load.go_on()

    def _beside(self, work: Callable[[], T]) -> T:
        """Do it in a thread, and be heard of meanwhile."""
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-sleep") as thread:
            future = thread.submit(work)
            while not future.done():
                concurrent.futures.wait((future,), WAIT_SLICE_S)
                self._waits()
            return future.result()

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise EngineAsleep(ASLEEP)

    def has_work(self) -> bool:
        """True while a step is in flight, a request is unfinished or an end is not told yet."""
        if self._in_flight or self._owed or self.scheduler.has_work():
            return True
        return bool(self.grammars.n_compiling or self.adapters.n_waiting)

    def stats(self, *, with_map: bool = True) -> EngineStats:
        """Gauges and counters now; the page map, which costs milliseconds in a large pool, only if asked for."""
        stats = self.scheduler.stats(with_map=with_map)
        stats.is_asleep = self.is_asleep
        stats.is_late = self.ranks is not None and self.ranks.is_late
        self.adapters.note(stats, self.scheduler.live)
        if self.expert_load is not None and not self.is_asleep:
            self.expert_load.note(stats, self.clock.now_s())
        return stats

    def shutdown(self) -> None:
        """Stop the executor and give its memory back when the steps in flight are done: other ranks wait for them."""
        self._drain()
        self.grammars.shutdown()
        self.adapters.close()
        self.executor.shutdown()
        if self.free_memory is not None:
            self.free_memory()
