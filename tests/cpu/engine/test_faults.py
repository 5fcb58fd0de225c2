"""What the loop makes of failures: of a launch, of a wait, of control itself, of commands. No model, no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.control.slot_params import slot_params
from quire.core.clock import MonotonicClock, VirtualClock
from quire.core.commands import Cancel, Submit
from quire.core.errors import EngineError, RequestError
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams
from quire.engine.core import MAX_FAILED_STEPS, EngineCore
from quire.engine.executors.digests import null_reference
from quire.engine.executors.executor import Executor
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor
from quire.engine.executors.null import NullExecutor

VOCAB = 50


class BrokenError(Exception):
    """What the fake device raises."""


class Pending:
    """A launched step that brings its result, or fails, once; waiting for it again is an error of the caller."""

    def __init__(self, result: StepResult, *, fails: bool) -> None:
        self._result, self._fails, self._n_waits = result, fails, 0

    def result(self) -> StepResult:
        self._n_waits += 1
        assert self._n_waits == 1, "a step was waited for twice"
        if self._fails:
            raise BrokenError("the device failed")
        return self._result


class FakeLauncher:
    """The null device behind the interface of the runner; fails in launches or waits of the steps named."""

    def __init__(self, launches: set[int] = frozenset(), waits: set[int] = frozenset()) -> None:
        self.bad_launches, self.bad_waits = launches, waits
        self.null = NullExecutor(
            n_pages=65, page_size=4, max_num_seqs=4, max_model_len=128, vocab_size=VOCAB, clock=VirtualClock()
        )

    def launch(self, plan: StepPlan) -> Pending:
        if plan.step in self.bad_launches:
            raise BrokenError("the launch failed")
        return Pending(self.null.execute(plan), fails=plan.step in self.bad_waits)


def engine(executor: Executor) -> EngineCore:
    config = SchedulerConfig(
        n_pages=65, page_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=128, pipeline_depth=2
    )
    return EngineCore(Scheduler(config, MonotonicClock()), executor, MonotonicClock(), 2)


def request(name: str, max_tokens: int = 6, n: int = 1) -> Request:
    prompt = [ord(char) % VOCAB for char in name] * 5
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(n=n), max_tokens=max_tokens, seed=3)


def run(core: EngineCore) -> list[SeqDelta]:
    heard: list[SeqDelta] = []
    for _ in range(500):
        if not core.has_work():
            return heard
        heard += core.step()
    raise AssertionError("the loop does not end")


def assert_one_end_each(heard: list[SeqDelta], names: list[str]) -> None:
    assert sorted(delta.request_id for delta in heard if delta.finish_reason is not None) == sorted(names)


def assert_works(core: EngineCore) -> None:
    """New requests on every slot have the tokens of the reference, and then every page is free."""
    requests = [request(name) for name in ("new", "fresh", "other", "more", "last")]
    for one in requests:
        core.handle(Submit(one))
    heard = run(core)
    for one in requests:
        said = [token for delta in heard if delta.request_id == one.request_id for token in delta.token_ids]
        assert said == null_reference(one.prompt_token_ids, slot_params(one, 0), one.max_tokens, VOCAB)
    stats = core.stats()
    assert stats.n_pages_free == stats.n_pages and stats.n_running == stats.n_waiting == 0


@pytest.mark.parametrize("make", [LaunchExecutor, ThreadExecutor])
@pytest.mark.parametrize("where", ["launches", "waits"])
@pytest.mark.parametrize("step", [0, 1, 2, 4, 6])
def test_a_failed_step_ends_what_runs_and_nothing_else(
    make: Callable[[FakeLauncher], Executor], where: str, step: int
) -> None:
    core = engine(make(FakeLauncher(**{where: {step}})))
    names = [f"request{i}" for i in range(6)]
    for name in names:
        core.handle(Submit(request(name)))
    heard = run(core)
    assert_one_end_each(heard, names)
    errors = [delta for delta in heard if delta.finish_reason is FinishReason.ERROR]
    assert errors and all(delta.failure and delta.failure.code is Code.ENGINE_ERROR for delta in errors)
    assert_works(core)
    core.shutdown()


def test_steps_in_flight_behind_a_failed_one_are_waited_for() -> None:
    launcher = FakeLauncher(waits={1, 2})
    core = engine(LaunchExecutor(launcher))
    core.handle(Submit(request("a")))
    assert_one_end_each(run(core), ["a"])
    assert_works(core)


@pytest.mark.parametrize("make", [LaunchExecutor, ThreadExecutor])
def test_the_engine_gives_up_after_some_failures_in_a_row(make: Callable[[FakeLauncher], Executor]) -> None:
    core = engine(make(FakeLauncher(launches=set(range(100)))))
    for i in range(MAX_FAILED_STEPS):
        core.check()
        core.handle(Submit(request(f"r{i}")))
        assert_one_end_each(run(core), [f"r{i}"])
    with pytest.raises(EngineError, match=f"{MAX_FAILED_STEPS} steps in a row failed"):
        core.check()
    core.handle(Submit(request("late")))
    with pytest.raises(EngineError, match="restart it"):
        core.step()
    core.shutdown()


def test_failures_that_are_not_in_a_row_do_not_add_up() -> None:
    launcher = FakeLauncher()
    core = engine(LaunchExecutor(launcher))
    for i in range(2 * MAX_FAILED_STEPS):
        core.handle(Submit(request(f"bad{i}")))
        core.step()
        launcher.bad_waits = {core.scheduler.in_flight[-1].step + 1}
        assert_one_end_each(run(core), [f"bad{i}"])
        assert_works(core)


def raiser(*_: object, **__: object) -> None:
    raise BrokenError("control failed")


@pytest.mark.parametrize("name", ["schedule", "commit"])
@pytest.mark.parametrize("n_steps", [0, 1, 3])
def test_an_exception_of_control_is_a_failed_step(name: str, n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(LaunchExecutor(FakeLauncher()))
    names = ["a", "b", "c", "d", "e"]
    for one in names:
        core.handle(Submit(request(one)))
    heard = [delta for _ in range(n_steps) for delta in core.step()]
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, name, raiser)
        for _ in range(2):
            heard += core.step()
    assert_one_end_each(heard + run(core), names)
    assert_works(core)


def test_an_exception_while_planning_leaves_no_half_admitted_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(LaunchExecutor(FakeLauncher()))
    core.handle(Submit(request("a")))
    with monkeypatch.context() as patch:
        patch.setattr("quire.control.plan_builder.PlanBuilder.open", raiser)
        assert_one_end_each(core.step(), ["a"])
    assert_works(core)


def test_an_exception_in_a_submission_refuses_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(LaunchExecutor(FakeLauncher()))
    core.handle(Submit(request("good")))
    with monkeypatch.context() as patch:
        patch.setattr("quire.control.live_seqs.slot_params", raiser)
        with pytest.raises(EngineError, match="taking this request"):
            core.handle(Submit(request("bad")))
    heard = run(core)
    assert_one_end_each(heard, ["good"])
    assert heard[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestError):
        core.handle(Submit(request("long", max_tokens=1000)))


@pytest.mark.parametrize("place", ["quire.control.queue.WaitQueue.push", "quire.control.live_seqs.LiveSeqs.end"])
def test_an_exception_in_half_of_a_command_ends_everything_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(LaunchExecutor(FakeLauncher()))
    core.handle(Submit(request("a")))
    core.step()
    with monkeypatch.context() as patch:
        patch.setattr(place, raiser)
        if place.endswith("push"):
            with pytest.raises(EngineError):
                core.handle(Submit(request("b")))
        else:
            core.handle(Cancel(["a"]))
    assert core.has_work(), "the ends are still to be told"
    assert_one_end_each(run(core), ["a"])
    assert_works(core)
