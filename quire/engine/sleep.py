"""Sleep: an engine without requests gives the memory of its device back, and gets it again later.

Owns what is said about it, and what stands in for the executor meanwhile. Does not own what is given up at which level
(`compute/worker`), nor requests (`engine/core`).
Invariant: an engine that cannot wake up holds what it held asleep; the number of pages stays what it was.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineError, InvalidParameter, QuireError, SleepFailed
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.executor import Executor

logger = logging.getLogger("quire.engine")

ASLEEP = "the engine sleeps: wake it up (POST /wake_up, LLM.wake_up()), and send the request again"
LEVELS = (1, 2)
TAGS = frozenset({"weights", "kv_cache"})
"""What vLLM can wake one by one."""


class Sleeper(Protocol):
    """A worker, as far as sleep is concerned: see `compute/worker`."""

    @property
    def is_loaded(self) -> bool: ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...


W = TypeVar("W", bound=Sleeper)


class SleepMode(Generic[W]):
    """The worker of an engine, and how an executor is made over it."""

    def __init__(self, worker: W, make: Callable[[W], Executor]) -> None:
        self._worker, self._make = worker, make
        self.is_asleep = False

    def sleep(self, level: int) -> None:
        """Give memory up. Nothing else may hold the executor any more. Deeper sleep may follow on level 1."""
        self.is_asleep = True
        start_s = time.perf_counter()
        self._worker.sleep(level)
        logger.info("asleep at level %d, in %.2f s", level, time.perf_counter() - start_s)

    def wake_up(self) -> Executor:
        """Take memory again. SleepFailed, with the reason, if it cannot be had: nothing is held then but what was."""
        start_s, level = time.perf_counter(), 1 if self._worker.is_loaded else 2
        try:
            self._worker.wake()
            executor = self._make(self._worker)
        except (QuireError, MemoryError, OSError, RuntimeError) as error:
            reason = error.message if isinstance(error, QuireError) else str(error).partition("\n")[0]
        else:
            self.is_asleep = False
            logger.info("awake, in %.2f s", time.perf_counter() - start_s)
            return executor
        self.sleep(level)
        raise SleepFailed(f"the engine cannot wake up: {reason}. It sleeps on; free memory and wake it again")


class AsleepExecutor:
    """Stands where the executor was. No step comes while the engine sleeps."""

    def prepare(self, _: StepPlan) -> None:
        """No step comes."""

    def submit(self, plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        """A step that failed."""
        future: concurrent.futures.Future[StepResult] = concurrent.futures.Future()
        future.set_exception(EngineError(f"step {plan.step} came while the engine sleeps"))
        return future

    def drafts(self) -> concurrent.futures.Future[list[SpanDrafts]]:
        """There are none."""
        future: concurrent.futures.Future[list[SpanDrafts]] = concurrent.futures.Future()
        future.set_result([])
        return future

    def mask(self, masks: StepMasks) -> None:
        """No step waits for masks."""

    def shutdown(self) -> None:
        """Nothing runs."""


def check_sleep(config: EngineConfig, level: int) -> None:
    """ConfigError without `enable_sleep_mode`, InvalidParameter for a level that is none."""
    _check_enabled(config)
    if level not in LEVELS:
        raise InvalidParameter("level", level, "1 (the weights are kept in the host's memory) or 2 (they are dropped)")


def check_wake(config: EngineConfig, tags: list[str] | None) -> None:
    """ConfigError without `enable_sleep_mode`, InvalidParameter where only a part is to be woken."""
    _check_enabled(config)
    if tags is not None and set(tags) != TAGS:
        raise InvalidParameter("tags", tags, "absent, or weights and kv_cache: both are woken together")


def _check_enabled(config: EngineConfig) -> None:
    if not config.enable_sleep_mode:
        raise ConfigError("sleep is off: start the engine with enable_sleep_mode (--enable-sleep-mode)")
