"""How long processes of a pipeline on CPUs waited for one another: what their busiest threads neither ran nor queued.

Owns the reading of Linux's per-thread clocks (`/proc/<pid>/task/<tid>/schedstat`: nanoseconds on a core, nanoseconds in
line for one). A thread that has no core because others use the machine counts as busy: its stage has work.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections import defaultdict
from typing import Self

Clocks = dict[tuple[int, int], int]
"""(process, thread) → nanoseconds on a core or in line for one."""


def clocks() -> Clocks:
    """Of all threads of this process and of its descendants; empty where the system has no such clocks."""
    found, processes = Clocks(), [os.getpid()]
    for process in processes:  # grows meanwhile
        try:
            for task in pathlib.Path(f"/proc/{process}/task").iterdir():
                on_core, in_line, _ = task.joinpath("schedstat").read_text().split()
                found[process, int(task.name)] = int(on_core) + int(in_line)
                processes += map(int, task.joinpath("children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


class StageIdle:
    """Between entering and leaving; `shares` of the time, of the stages in order, rank 0 being this process. Empty
    where nobody knows."""

    def __init__(self, n_stages: int) -> None:
        self._n_stages = n_stages
        self.shares: list[float] = []

    def __enter__(self) -> Self:
        self._before, self._begin_s = clocks(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, busy_s = time.perf_counter() - self._begin_s, defaultdict[int, float](float)
        for (process, thread), clock in clocks().items():
            own_s = 1e-9 * (clock - self._before.get((process, thread), 0))
            busy_s[process] = max(busy_s[process], own_s)
        busiest = sorted(busy_s, key=lambda process: -busy_s[process])[: self._n_stages]
        stages = sorted(busiest, key=lambda process: (process != os.getpid(), process))
        self.shares = [max(0.0, 1 - busy_s[process] / seconds) for process in stages]
