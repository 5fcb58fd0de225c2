"""The loop of the engine process on a fake socket: bad commands, broken devices, stalls, long steps, the log line."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
import types
from collections import deque
from concurrent.futures import Future

import msgspec
import pytest
import zmq
from test_faults import FakeLauncher, engine, request, run

from quire.config.engine import EngineConfig
from quire.core.commands import Hello, LoadAdapter, Shutdown, Submit, UnloadAdapter
from quire.core.errors import ConfigError, EngineError
from quire.core.events import Done, EndKind, EngineEnd, EngineReady, EngineStats, FinishReason, SeqDelta, StepOutputs
from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine import process
from quire.engine.adapters import AdapterRegistry
from quire.engine.command_reader import read_commands
from quire.engine.core import MAX_FAILED_STEPS, EngineCore
from quire.engine.executors.executor import RanksLost
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor
from quire.engine.process import EngineLoop
from quire.engine.progress import SILENCE_LIMIT_S, STALL_LIMIT_S, STEP_LIMIT_S, makes_progress
from quire.engine.router import ClientRouter
from quire.engine.status_pipe import StatusPipe
from quire.engine.throughput import LOG_PERIOD_S, ThroughputLog
from quire.engine.wire import ProcessStart, decode_event, encode

READY = EngineReady(128, n_pages=65, page_size=4, logits_width=50, device="null")


class FakeSocket:
    """A ROUTER with one client. Messages to the loop come from a list, one a turn; what it sends is kept. Ends the loop
    when told enough."""

    def __init__(self, *messages: bytes) -> None:
        self.inbox = deque(messages)
        self.deltas: list[SeqDelta] = []
        self.stats: list[EngineStats] = []
        self.turns_left = 10_001

    def poll(self, timeout_ms: float) -> bool:
        self.turns_left -= 1
        if not self.inbox and (timeout_ms > 0 or self.turns_left == 0):  # idle: everything is answered
            self.inbox.append(encode([Shutdown()]))
        return bool(self.inbox)

    def recv_multipart(self) -> list[bytes]:
        return [b"client", self.inbox.popleft()]

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int) -> None:
        assert parts[0] == b"client" and flags == zmq.DONTWAIT
        event = decode_event(parts[1])
        if event == READY:
            return
        assert isinstance(event, StepOutputs)
        self.deltas += event.deltas
        self.stats += [] if event.stats is None else [event.stats]

    def close(self) -> None: ...

    def ends(self) -> dict[str, FinishReason]:
        ends = [(delta.request_id, delta.finish_reason) for delta in self.deltas if delta.finish_reason is not None]
        assert len(dict(ends)) == len(ends), "a request ended twice"
        return dict(ends)  # type: ignore[arg-type]


def serve(core: EngineCore, socket: FakeSocket) -> None:
    socket.inbox.appendleft(encode([Hello()]))
    router = ClientRouter(socket, READY)  # type: ignore[arg-type]
    EngineLoop(core, router, StatusPipe(-1), log_stats=False).run()


def broken(submit: Submit, path: str, value: object) -> dict[str, object]:
    """The command as a dictionary with one wrong field."""
    command: dict[str, object] = msgspec.to_builtins(submit)
    inner = command
    *folders, name = path.split(".")
    for folder in folders:
        inner = inner[folder]  # type: ignore[assignment]
    inner[name] = value
    return command


def test_undecodable_commands_are_dropped_or_refused_and_others_served() -> None:
    socket = FakeSocket(
        b"\xc1 no message at all",
        encode([{"type": "nonsense"}, Submit(request("good"))]),
        encode([broken(Submit(request("bad")), "request.max_tokens", "many"), Submit(request("fine"))]),
        encode([broken(Submit(request("lost")), "request.request_id", 7)]),
        encode({"type": "shutdown"}),
    )
    serve(engine(LaunchExecutor(FakeLauncher())), socket)
    assert socket.ends() == {"good": FinishReason.LENGTH, "fine": FinishReason.LENGTH, "bad": FinishReason.ERROR}


def test_every_sample_of_an_unread_request_is_answered() -> None:
    commands, refused = read_commands(encode([broken(Submit(request("bad", n=3)), "request.prompt_token_ids", "x")]))
    assert commands == [] and [delta.index for delta in refused] == [0, 1, 2]
    assert all(delta.failure and "not understood" in delta.failure.message for delta in refused)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("request.params.temperature", -1.0, "request.params.temperature"),
        ("request.params.min_tokens", 99, "min_tokens = 99 is not allowed"),
    ],
)
def test_a_parameter_that_is_not_allowed_ends_its_own_request(path: str, value: object, said: str) -> None:
    """Whether the decoder or the type's own check finds it."""
    good, bad = Submit(request("good")), broken(Submit(request("bad")), path, value)
    commands, refused = read_commands(encode([bad, good]))
    assert commands == [good] and [delta.request_id for delta in refused] == ["bad"]
    assert refused[0].failure is not None and said in refused[0].failure.message


def test_the_loop_ends_when_every_step_fails() -> None:
    """One request a message: each is answered, then the loop gives up instead of looking healthy."""
    socket = FakeSocket(*[encode([Submit(request(f"r{i}"))]) for i in range(9)])
    socket.poll = one_message_when_idle(socket)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="steps in a row failed"):
        serve(engine(LaunchExecutor(FakeLauncher(launches=set(range(99))))), socket)
    assert socket.ends() == {f"r{i}": FinishReason.ERROR for i in range(MAX_FAILED_STEPS)}


def one_message_when_idle(socket: FakeSocket):  # type: ignore[no-untyped-def]
    return lambda timeout_ms: timeout_ms > 0 and bool(socket.inbox)


def test_a_scheduler_that_plans_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(LaunchExecutor(FakeLauncher()))
    monkeypatch.setattr(core.scheduler, "schedule", lambda: None)
    core.handle(Submit(request("a")))
    core.scheduler.counters.progress_s -= STALL_LIMIT_S
    socket = FakeSocket()
    socket.turns_left = 6
    serve(core, socket)
    last = socket.stats[-1]
    assert last.steps_in_flight == 0 and last.n_waiting == 1
    for device in ("cpu", "cuda"):
        assert not makes_progress(device, 0.0, last.last_step_age_s, last.steps_in_flight)


class SlowLauncher(FakeLauncher):
    """Holds the first step until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        assert self.go_on.wait(20)
        return super().launch(plan)


def test_a_long_step_is_reported_while_it_computes() -> None:
    launcher = SlowLauncher()
    core = engine(ThreadExecutor(launcher))
    socket = FakeSocket(encode([Submit(request("a"))]))
    threading.Timer(1.2, launcher.go_on.set).start()
    serve(core, socket)
    assert socket.ends() == {"a": FinishReason.LENGTH}
    during = [stats for stats in socket.stats if stats.last_step_age_s > 0.2]
    assert len(during) >= 3, "statistics come while a step computes"
    assert all(stats.steps_in_flight > 0 for stats in during)


def test_a_step_that_raises_timeout_is_a_failed_step() -> None:
    class TimingOut:
        def submit(self, plan: StepPlan) -> Future[StepResult]:
            future: Future[StepResult] = Future()
            future.set_exception(TimeoutError("the device took too long"))
            return future

        def shutdown(self) -> None: ...

    core = engine(TimingOut())
    core.handle(Submit(request("a")))
    assert [delta.finish_reason for delta in run(core)] == [FinishReason.ERROR]


@pytest.mark.parametrize("device", STEP_LIMIT_S)
def test_limits_of_health(device: str) -> None:
    step_s, silence_s = STEP_LIMIT_S[device], SILENCE_LIMIT_S[device]
    assert makes_progress(device, 0.9 * silence_s, 0.0, 0)
    assert not makes_progress(device, 1.1 * silence_s, 0.0, 0)
    assert makes_progress(device, 0.0, 0.9 * step_s, 1)
    assert not makes_progress(device, 0.0, 1.1 * step_s, 1)
    assert not makes_progress(device, 0.0, 1.1 * STALL_LIMIT_S, 0)


def test_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    log = ThroughputLog(0.0)
    with caplog.at_level(logging.INFO, logger="quire.engine"):
        log.note(EngineStats(), LOG_PERIOD_S)
        assert not caplog.records, "nothing is said while nothing happens"
        busy = EngineStats(
            n_running=3, n_waiting=1, n_pages=200, n_pages_free=150, prompt_tokens=500, generation_tokens=100,
            prefix_queries=400, prefix_hits=100,
        )  # fmt: skip
        log.note(busy, LOG_PERIOD_S + 1)
        log.note(busy, 2 * LOG_PERIOD_S)
        log.note(EngineStats(prompt_tokens=500, generation_tokens=150, steps=9), 3 * LOG_PERIOD_S)
        log.note(EngineStats(prompt_tokens=500, generation_tokens=150, steps=9), 4 * LOG_PERIOD_S)
    first, second = [record.getMessage() for record in caplog.records]
    assert first == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%"
    )
    assert "prompt throughput: 0.0" in second and "generation throughput: 5.0" in second


def test_gauges_of_a_thousand_sequences_take_less_than_a_millisecond() -> None:
    from quire.control.config import SchedulerConfig
    from quire.control.scheduler import Scheduler
    from quire.core.clock import MonotonicClock

    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=70_000, page_size=16, max_num_seqs=1000, max_num_batched_tokens=1_000_000, max_model_len=2000
        ),
        MonotonicClock(),
    )
    for i in range(1000):
        one = request("a")
        one.request_id, one.prompt_token_ids = str(i), [i, *range(1000)]
        scheduler.submit(one)
    while scheduler.live.waiting:
        assert scheduler.schedule() is not None
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        assert scheduler.stats(with_map=False).n_running == 1000
        times.append(time.perf_counter() - start_s)
    assert min(times) < 1e-3


@pytest.mark.parametrize("ends", [[], [EngineEnd(0, EndKind.CRASH)]], ids=["first", "again"])
def test_an_engine_is_built_as_the_first_or_again(ends: list[EngineEnd]) -> None:
    """What an engine before it could read may be gone: it is started nevertheless."""
    seen = []

    def build(config: EngineConfig, **how: bool) -> tuple[EngineCore, EngineReady]:
        seen.append(how)
        raise ConfigError("enough")

    start = ProcessStart("", -1, EngineConfig(device="null"), ends=ends)
    assert process.serve(start, None, StatusPipe(-1), build) == 1  # type: ignore[arg-type]
    assert seen == [{"is_server": True, "is_restart": bool(ends)}]


class LosingReader:
    """Reads 'ok'; what concerns other ranks finds them lost once it is told so."""

    loss: RanksLost | None = None

    def read_adapter(self, path: str, root: str) -> tuple[str, int, str]:
        self.drop_adapter(path)
        return path, 8, "weights"

    def keep_adapter(self, content_id: str, kept: str) -> None:
        self.drop_adapter(content_id)

    def drop_adapter(self, content_id: str) -> None:
        if self.loss is not None:
            raise self.loss


def test_a_rank_that_is_lost_is_no_answer_to_who_loads_an_adapter() -> None:
    """Else a client would be told that its path is wrong. The socket takes no answers."""
    reader, core = LosingReader(), engine(LaunchExecutor(FakeLauncher()))
    core.adapters = AdapterRegistry(reader, 1)
    loop = EngineLoop(core, ClientRouter(FakeSocket(), READY), StatusPipe(-1), log_stats=False)  # type: ignore[arg-type]
    loop._lora_root = "/"
    core.adapters.load("x", "/x")
    reader.loss = RanksLost("rank 1 ended with SIGKILL", EndKind.KILLED)
    with pytest.raises(RanksLost):
        loop._handle(LoadAdapter(1, "y", "/y"))  # it lets go of x
    core.adapters = AdapterRegistry(reader, 1)
    loop._handle(LoadAdapter(2, "y", "/y"))
    concurrent.futures.wait([loop._loading[2].reading])
    with pytest.raises(RanksLost):
        loop._finish_loading()
    core.adapters = AdapterRegistry(reader, 1)
    reader.loss = None
    core.adapters.load("x", "/x")
    reader.loss = RanksLost("rank 1 ended with SIGKILL", EndKind.KILLED)
    with pytest.raises(RanksLost):
        loop._handle(UnloadAdapter(3, "x"))


def test_who_asked_for_an_adapter_is_told_which_field_is_to_blame() -> None:
    core, answers = engine(LaunchExecutor(FakeLauncher())), list[Done]()
    core.adapters = AdapterRegistry(LosingReader(), 1)
    router = ClientRouter(FakeSocket(), READY)  # type: ignore[arg-type]
    router.answer = answers.append  # type: ignore[method-assign, assignment]
    loop = EngineLoop(core, router, StatusPipe(-1), log_stats=False)
    loop._lora_root = "/"
    core.adapters.begin("x", "/x")
    loop._handle(LoadAdapter(1, "y", "/y"))  # all that the host keeps are being read
    loop._handle(LoadAdapter(2, "z", ""))
    assert [(one.ticket, one.value, one.param) for one in answers] == [(1, False, "lora_name"), (2, False, "lora_path")]
    done = loop._carry_out(UnloadAdapter(3, "nobody"))
    assert (done.ticket, done.param) == (3, "lora_name") and "nobody" in str(done.error)


def test_a_late_rank_is_told_of_while_the_loop_waits_for_a_device() -> None:
    """On a GPU that wait cannot be divided, and takes as long as the rank is late. Neither the device nor the scheduler
    is asked for anything, and another thread that waits says nothing."""
    core, told = engine(LaunchExecutor(FakeLauncher())), list[StepOutputs]()
    core.ranks = ranks = types.SimpleNamespace(is_late=False, on_late=None, on_loss=None)  # type: ignore[assignment]
    router = ClientRouter(FakeSocket(), READY)  # type: ignore[arg-type]
    router.broadcast = told.append  # type: ignore[method-assign, assignment]
    loop = EngineLoop(core, router, StatusPipe(-1), log_stats=False)
    assert ranks.on_late is not None
    ranks.on_late()
    assert not told, "nothing is known yet"
    loop._send_stats()
    core.stats = lambda **asked: pytest.fail("the device would be read")  # type: ignore[method-assign]
    beside = threading.Thread(target=ranks.on_late)
    for _ in range(3):
        loop._next_stats_s = 0.0
        if beside.ident is None:
            beside.start()
            beside.join()
        ranks.on_late()
        ranks.on_late()
    assert [one.stats is not None and one.stats.is_late for one in told] == [False, True, True, True]
