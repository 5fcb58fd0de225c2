"""Records some steps of an engine: torch.profiler for what the device does, the engine's own records for the host.

Owns the window and the clock that both share. Does not own what the figures mean (`breakdown.py`). Run it after
everything that is timed: a profiler slows steps down and may stay attached to the device.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quire.bench.breakdown import Capture, Kernel, outermost
from quire.core import env
from quire.core.errors import EngineError
from quire.engine.step_record import StepRecord
from quire.kernels import native
from quire.kernels.moe import op as moe_op
from quire.kernels.moe import packed as moe_packed
from quire.kernels.state import op as state_op

MAX_STEPS = 32
"""Steps of a window."""
SETTLING_STEPS = 4
"""Steps between the start of the profiler, which stops the host for a while, and the window."""
NAMED_OPS: tuple[Any, ...] = (moe_op, moe_packed, state_op)
"""Modules that choose implementations of ops which are a part of the breakdown of their own."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op", "user_annotation")
"""What the profiler calls the work of a GPU and of a CPU."""


class _Recorded(Exception):
    """All steps of the window are there: the rest of the pass is not needed."""


class _Recorder:
    """The `on_step` hook of a pass: profiles `n` steps after the first `first`; with `first` 0 all that come."""

    def __init__(self, device: str, first: int, n: int) -> None:
        self.records: list[StepRecord] = []
        self.device, self.first, self.n = device, first, n
        self.begin_s = time.monotonic()
        self.offset_s = 0.0
        """Time since 1970, which the profiler counts, minus the engine's clock."""
        # Without this the profiler of torch 2.13 prints a line whenever it starts or stops.
        env.set_for_children("KINETO_LOG_LEVEL", "99")
        if device == "cuda":
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
        else:  # a CPU computes in a thread of its own
            options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self.profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=options)

    def start(self) -> None:
        self.profiler.start()
        self.offset_s = time.time() - time.monotonic()

    def on_step(self, record: StepRecord) -> None:
        if record.times.schedule_s < self.begin_s:  # left over from a pass that was ended
            return
        self.records.append(record)
        if not self.first:
            return
        if len(self.records) == self.first - SETTLING_STEPS:
            self.start()
        elif len(self.records) == self.first + self.n:
            raise _Recorded

    def capture(self) -> Capture:
        """What was recorded, once the profiler has stopped."""
        if len(self.records) < self.first + self.n:
            raise EngineError(
                f"the profiled pass took {len(self.records)} steps instead of {self.first + self.n} or more"
            )
        begin_s = self.records[self.first - 1].times.commit_s if self.first else self.records[0].times.schedule_s
        kernels = read_kernels(_exported(self.profiler), self.device, self.offset_s)
        return Capture(begin_s, self.records[-1].times.commit_s, self.records, kernels)


def capture(llm: Any, run: Callable[[], object], n_steps: int, device: str) -> Capture:
    """Profile steps in the middle of `run`, which makes `llm` take `n_steps` steps, and end it after them.

    All steps when there are too few for a middle. device: 'cpu' or 'cuda'. EngineError if `run` takes far fewer steps.
    """
    n = min(MAX_STEPS, n_steps // 2)
    first = (n_steps - n) // 2
    recorder = _Recorder(device, first, n) if first > SETTLING_STEPS else _Recorder(device, 0, 1)
    llm.on_step = recorder.on_step
    with _calls_named() if device == "cpu" else contextlib.nullcontext():
        if not recorder.first:
            recorder.start()
        try:
            run()
        except _Recorded:
            pass
        finally:
            llm.on_step = None
        recorder.profiler.stop()
    return recorder.capture()


def read_kernels(trace: dict[str, Any], device: str, offset_s: float) -> list[Kernel]:
    """The device's work in a trace of torch.profiler, by time of start, on the engine's clock.

    On a CPU these are the outermost operators of the busiest thread that is not this one.
    """
    base_s = trace.get("baseTimeNanoseconds", 0) / 1e9 - offset_s
    found: dict[int, list[Kernel]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event["cat"] in (DEVICE_CATEGORIES if device == "cuda" else HOST_CATEGORIES):
            start_s = base_s + event["ts"] / 1e6
            row = 0 if device == "cuda" else event["tid"]
            found.setdefault(row, []).append(Kernel(event["name"], start_s, start_s + event["dur"] / 1e6))
    if device == "cuda":
        return sorted(found.get(0, []), key=lambda kernel: kernel.start_s)
    found.pop(threading.get_native_id(), None)
    rows = [outermost(kernels) for kernels in found.values()]
    return max(rows, key=lambda row: sum(kernel.end_s - kernel.start_s for kernel in row), default=[])


def _exported(profiler: profile) -> dict[str, Any]:
    """The profiler's own Chrome trace: its one public form that tells kernels from launches."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_bytes())
    return trace


@contextlib.contextmanager
def _calls_named() -> Iterator[None]:
    """Calls of the native CPU library appear in the profile as operators do, under the names of its functions, and so
    do whole ops of experts and states, whatever they are made of."""
    library = native.library()
    functions = {} if library is None else {n: f for n, f in vars(library).items() if n.startswith("quire_")}
    selects = {module: module.select for module in NAMED_OPS}
    try:
        for name, function in functions.items():
            setattr(library, name, functools.partial(_named_call, name, function))
        for module, select in selects.items():
            module.select = functools.partial(_named_choice, select)
        yield
    finally:
        for name, function in functions.items():
            setattr(library, name, function)
        for module, select in selects.items():
            module.select = select


def _named_choice(select: Callable[..., Any], op: str, function: str, *arguments: Any) -> Callable[..., Any]:
    return functools.partial(_named_call, f"quire_{op}_{function}", select(op, function, *arguments))


def _named_call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with record_function(name):
        return function(*arguments)
