"""The engine process on a device that does what a prompt says: die, hang, run out of memory.

A prompt that begins with one of the tokens below asks for its fault; the second token says when: while the prompt is
computed (0), or while output token number k is.

Run as `python faulty_engine.py [ALONE_S [SLOW_S]]`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import Future

from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import MonotonicClock, VirtualClock
from quire.core.errors import DeviceOutOfMemory
from quire.core.events import EngineReady
from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine import trials
from quire.engine.core import EngineCore
from quire.engine.executors.null import NullExecutor
from quire.engine.process import main

KILL, HANG, BIG, SLOW, CRASH = 201, 202, 203, 204, 205
"""The process is killed, hangs, crashes; the prompt runs out of memory unless it is alone, or takes a while."""


class Faulty:
    """Wraps the null device; the rest of the executor's interface is the null device's own."""

    slow_s = 0.05
    """What a step takes that a slow prompt is in."""

    def __init__(self, inner):  # type: ignore[no-untyped-def]
        self._inner = inner
        self._opened: dict[int, tuple[int, int, int]] = {}
        """Slot → fault, when, length of the prompt, of what runs there."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        for opened in plan.opened:
            self._opened[opened.slot] = (opened.token_ids[0], opened.token_ids[1], opened.prompt_len)
        faults = []
        for slot, start in zip(plan.spans.slots, plan.spans.starts, strict=True):
            fault, when, prompt_len = self._opened[slot]
            if max(0, start - prompt_len + 1) >= when:
                faults.append(fault)
        if KILL in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if CRASH in faults:
            os.kill(os.getpid(), signal.SIGSEGV)
        if HANG in faults:
            time.sleep(1000)
        if SLOW in faults:
            time.sleep(self.slow_s)
        if BIG in faults and len(plan.spans) > 1:
            failed: Future[StepResult] = Future()
            failed.set_exception(DeviceOutOfMemory("injected"))
            return failed
        return self._inner.submit(plan)


def build(config: EngineConfig, *, is_server: bool, is_restart: bool) -> tuple[EngineCore, EngineReady]:
    """As `build_engine` for the null device, but torch is not imported: the process is there in half a second."""
    assert config.device == "null" and is_server
    width, max_len, n_pages = read_arch(find_checkpoint(config.model)).vocab_size, 2048, 1 << 14
    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=n_pages, page_size=config.block_size, max_num_seqs=config.max_num_seqs or 256,
            max_num_batched_tokens=8192, max_model_len=max_len, pipeline_depth=config.pipeline_depth,
            max_num_waiting=config.max_num_waiting,
        ),
        MonotonicClock(),
    )  # fmt: skip
    executor = NullExecutor(
        n_pages=n_pages, page_size=config.block_size, max_num_seqs=config.max_num_seqs or 256, max_model_len=max_len,
        vocab_size=width, clock=VirtualClock(),
    )  # fmt: skip
    core = EngineCore(scheduler, Faulty(executor), scheduler.clock, config.pipeline_depth)  # type: ignore[arg-type]
    max_num_seqs = config.max_num_seqs or 256
    return core, EngineReady(max_len, n_pages, config.block_size, width, "null", max_num_seqs=max_num_seqs)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        trials.ALONE_S = float(sys.argv[1])
    if len(sys.argv) > 2:
        Faulty.slow_s = float(sys.argv[2])
    sys.exit(main(build))
