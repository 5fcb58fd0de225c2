"""What the memory of a dead engine says: every request of the steps in flight, how far each was, and nothing torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.commands import Submit
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.core import EngineCore
from quire.engine.executors.null import NullExecutor
from quire.engine.flight_recorder import FlightRecorder, make_memory, read_memory
from quire.engine.quarantine import fingerprint


def request(name: str, prompt_len: int = 4, max_tokens: int = 20) -> Request:
    ids = [len(name), *range(prompt_len - 1)]
    return Request(
        request_id=name, prompt_token_ids=ids, params=SamplingParams(ignore_eos=True), max_tokens=max_tokens, seed=1
    )


class Engine:
    """A real core on the null device, whose steps are checked against the memory as it is when they are submitted."""

    def __init__(self, **options: int) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | options
        scheduler = Scheduler(SchedulerConfig(n_pages=64, page_size=4, **sizes), VirtualClock())
        executor = NullExecutor(
            n_pages=64, page_size=4, max_num_seqs=sizes["max_num_seqs"], max_model_len=64, vocab_size=50,
            clock=VirtualClock(),
        )  # fmt: skip
        self.core = EngineCore(scheduler, executor, VirtualClock(), 2)
        self.memory = make_memory()
        self.stages: dict[str, int] = {}
        self.recorder = FlightRecorder(os.dup(self.memory), lambda name: self.stages.get(name, 0))
        self.core.on_plan = self.recorder.note_steps
        self._submit, executor.submit = executor.submit, self.submit  # type: ignore[method-assign]
        self.n_steps = 0

    def submit(self, plan):  # type: ignore[no-untyped-def]
        self.n_steps += 1
        expected: dict[str, int] = {}
        for builder in self.core.scheduler.in_flight:
            for seq in builder.seqs:
                n_outputs = max(0, seq.planned - seq.prompt_len + 1)
                expected[seq.request.request_id] = max(expected.get(seq.request.request_id, 0), n_outputs)
        assert {working.request_id: working.n_outputs for working in read_memory(self.memory)} == expected
        return self._submit(plan)


def test_it_names_what_is_computed_and_how_far_it_is() -> None:
    """Prompts in chunks, decodes, ends, a preemption's return, more requests than slots: at every single step."""
    engine = Engine()
    for name, prompt_len, max_tokens in (
        ("a", 4, 20),
        ("bb", 40, 9),
        ("ccc", 9, 30),
        ("dddd", 3, 2),
        ("eeeee", 30, 30),
    ):
        engine.core.handle(Submit(request(name, prompt_len, max_tokens)))
    while engine.core.has_work():
        engine.core.step()
    assert engine.n_steps > 30
    assert read_memory(engine.memory), "the last steps"
    engine.recorder.note_idle()
    assert read_memory(engine.memory) == []


def test_stages() -> None:
    engine = Engine()
    first, second = request("a"), request("bb")
    engine.core.handle(Submit(first))
    engine.core.step()
    engine.stages["a"] = 1
    engine.recorder.note_stages()
    (found,) = read_memory(engine.memory)
    assert (found.request_id, found.stage, found.mark) == ("a", 1, fingerprint(first))
    engine.core.handle(Submit(second))
    engine.core.step()
    assert {working.request_id for working in read_memory(engine.memory)} == {"a", "bb"}


def test_a_kill_at_any_moment_leaves_a_whole_record() -> None:
    """A process writes records of changing size as fast as it can and is killed: each time the memory can be read."""
    code = """
import sys
from types import SimpleNamespace
from quire.engine.flight_recorder import FlightRecorder
from test_flight_recorder import request
recorder = FlightRecorder(int(sys.argv[1]), lambda name: 0)
print("ready", flush=True)
seqs = [SimpleNamespace(request=request("x" * n), planned=0, prompt_len=4) for n in range(1, 40)]
while True:
    for n in (*range(40), *range(39, 0, -1)):
        recorder._written = [seqs[:n]]
        recorder.note_stages()
"""
    for attempt in range(6):
        memory = make_memory()
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(memory)], pass_fds=[memory], stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
        )  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.013 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        names = [working.request_id for working in read_memory(memory)]
        lengths = [len(name) for name in names]
        assert lengths == list(range(lengths[0], lengths[-1] + 1)) if lengths else True
        process.stdout.close()
        os.close(memory)


def test_memory_that_was_never_written_or_is_damaged_says_nothing() -> None:
    memory = make_memory()
    assert read_memory(memory) == []
    os.pwrite(memory, b"\xff" * 4096, 0)
    assert read_memory(memory) == []
    os.pwrite(memory, b"\0" * 16 + b"\xff" * 4096, 0)
    assert read_memory(memory) == []
    os.close(memory)
