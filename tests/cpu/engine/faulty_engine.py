"""The engine process on a device that does what a prompt's first token says: die, hang, run out of memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import Future

from quire.core.errors import DeviceOutOfMemory
from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine.build import build_engine
from quire.engine.process import main

KILL, HANG, BIG, SLOW = 201, 202, 203, 204
"""First tokens of prompts that kill the process, hang, run out of memory unless they are alone, and take a while."""


class Faulty:
    """Wraps the null device; the rest of the executor's interface is the null device's own."""

    def __init__(self, inner):  # type: ignore[no-untyped-def]
        self._inner = inner
        self._first: dict[int, int] = {}
        """Slot → the first token of what runs there."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        for opened in plan.opened:
            self._first[opened.slot] = opened.token_ids[0]
        firsts = [self._first[slot] for slot in plan.spans.slots]
        if KILL in firsts:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in firsts:
            time.sleep(1000)
        if SLOW in firsts:
            time.sleep(0.05)
        if BIG in firsts and len(firsts) > 1:
            failed: Future[StepResult] = Future()
            failed.set_exception(DeviceOutOfMemory("injected"))
            return failed
        return self._inner.submit(plan)


def build(config, *, is_server):  # type: ignore[no-untyped-def]
    core, ready = build_engine(config, is_server=is_server)
    core.executor = Faulty(core.executor)
    return core, ready


if __name__ == "__main__":
    sys.exit(main(build))
