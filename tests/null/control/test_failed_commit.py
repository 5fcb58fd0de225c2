"""An exception at any stage of a commit: every request has exactly one end, nothing is held, the next text is right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from test_scheduler_cases import Rig

from quire.control import commit, faults
from quire.control.cache import PageCache
from quire.control.live_seqs import LiveSeqs
from quire.control.pages import PagePool
from quire.control.scheduler import Scheduler
from quire.control.tree import PrefixTree
from quire.core.errors import EngineError
from quire.core.events import SeqDelta
from quire.core.failure import Code, Failure
from quire.core.result import Fault, StepResult
from quire.core.sampling import SamplingParams

STAGES: list[tuple[Any, str]] = [
    (commit, "_append_token"),
    (commit, "_complete_first"),
    (LiveSeqs, "end"),
    (LiveSeqs, "_vacate"),
    (PageCache, "release"),
    (PageCache, "publish"),
    (PrefixTree, "unlock"),
    (PagePool, "drop"),
    (faults, "_distrust"),
]


class BrokenError(Exception):
    """What is injected."""


def break_at(patch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool) -> list[int]:
    """Raise at the `call`-th call of `owner.name`, before or after its work; the list has one entry once it was."""
    real, calls, raised = getattr(owner, name), [0], list[int]()

    def broken(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] != call:
            return real(*args, **named)
        raised.append(call)
        if after:
            real(*args, **named)
        raise BrokenError

    patch.setattr(owner, name, broken)
    return raised


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize(("owner", "name"), STAGES, ids=lambda part: part if isinstance(part, str) else "")
def test_an_exception_in_commit_loses_no_end(
    owner: Any, name: str, call: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pipeline_depth=2)
    names = [(rig.submit(f"r{i}", [i % 2 + 1] * 9, 1 if i != 4 else 3, n=1 + (i == 3)).request_id, 0) for i in range(6)]
    names.append(("r3", 1))
    rig.plan()
    rig.plan()
    if owner is faults or call == 3:
        inject_fault(rig)
    heard: list[SeqDelta] = []
    with monkeypatch.context() as patch:
        raised = break_at(patch, owner, name, call, after=after)
        try:
            while rig.results:
                heard += rig.scheduler.commit(rig.results.popleft())
        except BrokenError:
            assert raised
    heard += rig.scheduler.fail_all(Failure(Code.ENGINE_ERROR, "broken"))
    ends = Counter((delta.request_id, delta.index) for delta in heard if delta.finish_reason is not None)
    assert ends == dict.fromkeys(names, 1), "each sequence has exactly one end"
    assert_nothing_is_left(rig)


def inject_fault(rig: Rig) -> None:
    """The first span of the oldest result failed."""
    result = rig.results[0]
    result.n_new[0] = 0
    del result.tokens[0]
    result.faults = [Fault(rig.scheduler.in_flight[0].plan.spans.slots[0], Code.NON_FINITE_LOGITS)]


def assert_nothing_is_left(rig: Rig) -> None:
    stats = rig.scheduler.stats()
    assert not rig.scheduler.has_work() and not rig.scheduler.in_flight
    assert stats.n_running == stats.n_waiting == stats.n_pages_cached == 0 and stats.n_pages_free == stats.n_pages
    assert sum(stats.finished.values()) == rig.scheduler.live.n_submitted
    rig.results.clear()
    requests = [rig.submit(f"new{i}", [i % 2 + 1] * 9, 5) for i in range(9)]
    rig.run()
    for request in requests:
        rig.check(request)


def results_that_do_not_fit() -> dict[str, Any]:
    return {
        "too few tokens": lambda result: result.tokens.pop(),
        "no count": lambda result: result.n_new.pop(),
        "no token and no fault": lambda result: (result.n_new.__setitem__(-1, 0), result.tokens.pop()),
        "a fault of another slot": lambda result: result.faults.append(Fault(7, Code.NON_FINITE_LOGITS)),
        "a token beside its fault": lambda result: result.faults.append(Fault(0, Code.NON_FINITE_LOGITS)),
        "logprobs lack": lambda result: result.logprobs.pop(2),
        "prompt logprobs for nobody": lambda result: result.prompt_logprobs.update({0: [result.logprobs[2]]}),
    }


@pytest.mark.parametrize("case", results_that_do_not_fit())
def test_a_result_that_does_not_fit_changes_nothing(case: str) -> None:
    rig = Rig()
    for i in range(3):
        rig.submit(f"r{i}", [i + 1] * 9, 1, params=SamplingParams(logprobs=1 if i == 2 else None))
    rig.plan()
    good = msgspec.msgpack.encode(rig.results.popleft())
    bad = msgspec.msgpack.decode(good, type=StepResult)
    results_that_do_not_fit()[case](bad)
    before = snapshot(rig.scheduler)
    with pytest.raises(EngineError):
        rig.scheduler.commit(bad)
    assert snapshot(rig.scheduler) == before
    assert len(rig.scheduler.commit(msgspec.msgpack.decode(good, type=StepResult))) == 3


def test_logprobs_that_lack_where_all_asked_change_nothing() -> None:
    rig = Rig()
    for i in range(3):
        rig.submit(f"r{i}", [i + 1] * 9, 1, params=SamplingParams(logprobs=1))
    rig.plan()
    result = rig.results.popleft()
    before, row = snapshot(rig.scheduler), result.logprobs.pop(1)
    with pytest.raises(EngineError, match="without the logprobs that its request asked for"):
        rig.scheduler.commit(result)
    assert snapshot(rig.scheduler) == before
    result.logprobs[1] = row
    assert [delta.logprobs for delta in rig.scheduler.commit(result)] == [result.logprobs[at] for at in range(3)]


def snapshot(scheduler: Scheduler) -> tuple[Any, ...]:
    live = scheduler.live
    return (
        [
            (seq.state, seq.computed, seq.planned, list(seq.tokens), [list(table) for table in seq.tables])
            for seq in live.running
        ],
        list(live.cache.pool.refs),
        list(live.free_slots),
        scheduler.stats(),
    )
