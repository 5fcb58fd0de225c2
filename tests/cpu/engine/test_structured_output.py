"""Structured output over its real processes: masks, moves, and what happens when a grammar ends a process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

import quire
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.commands import Cancel, Submit
from quire.core.errors import GrammarsBusy, RequestError
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code
from quire.core.plan import SpanDrafts
from quire.core.request import Request, Terms
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.core import EngineCore
from quire.engine.executors.null import NullExecutor
from quire.engine.grammars import trials
from quire.engine.grammars.manager import StructuredOutput, Unmasked
from quire.engine.grammars.processes import COMMAND, GrammarProcesses
from quire.engine.grammars.trials import GrammarTrials, key_of
from quire.engine.grammars.wire import BELLS, MARKS, Channel, GrammarSettings, shared_bytes
from quire.engine.sleep import AsleepExecutor
from quire.text.tokenizer import HfTokenizer

WIDTH = 4096
N_BYTES = WIDTH // 8
FOLDER = pathlib.Path(quire.__file__).parent / "_models" / "demo"
FAULTY = str(pathlib.Path(__file__).with_name("faulty_matchers.py"))
LOOPS_LATE = (
    "%ignore / +/\nstart: /[b-gi-z][a-z]{2,30}/ | /h[a-df-z][a-z]{2,30}/ | /he[a-km-z][a-z]{2,30}/"
    ' | /hel[a-km-z][a-z]{2,30}/ | "hello" " " /x/'
)
"""The library loops once this has said hello: after it only blanks, which are ignored, can come."""


def settings(**other: Any) -> GrammarSettings:
    values = {"n_processes": 1, "compile_s": 5.0, "compile_bytes": 1 << 30, **other}
    return GrammarSettings(str(FOLDER), WIDTH, [2, 0], WIDTH // 32, 64, **values)


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer.load(FOLDER)


@pytest.fixture(params=[1, 3])
def structured(request: pytest.FixtureRequest) -> Iterator[StructuredOutput]:
    one = StructuredOutput(GrammarProcesses(settings(n_processes=request.param)))
    yield one
    one.shutdown()


def scheduler() -> Scheduler:
    config = SchedulerConfig(n_pages=65, page_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64)
    return Scheduler(config, VirtualClock())


def request(number: int, n: int = 1, tenant: str = "", **kind: Any) -> Request:
    params = SamplingParams(n=n, structured_outputs=StructuredOutputsParams(**kind))
    return Request(
        request_id=f"r{number}", prompt_token_ids=[5, 6], params=params, max_tokens=8, seed=number,
        terms=Terms(tenant=tenant),
    )  # fmt: skip


def begin(structured: StructuredOutput, engine: Scheduler, *requests: Request) -> None:
    for one in requests:
        structured.admit(one)
    while structured.n_compiling:
        assert all(error is None for _, error in structured.ready(1.0))
    for one in requests:
        engine.submit(one)


def masks_of(structured: StructuredOutput, engine: Scheduler) -> list[bytes]:
    plan = engine.schedule()
    assert plan is not None and plan.masked == list(range(len(plan.spans)))
    bits = bytes(structured.masks(newest(engine)).bits)
    return [bits[at : at + N_BYTES] for at in range(0, len(bits), N_BYTES)]


def follow(
    structured: StructuredOutput, deltas: list[SeqDelta], engine: Scheduler, unmasked: Unmasked | None = None
) -> None:
    """Wait for what it leads to, and note ends in the deltas."""
    structured.follow(deltas, unmasked)
    of = {(delta.request_id, delta.index): delta for delta in deltas}
    for end in structured.ended(engine):
        delta = of[end.request_id, end.index]
        delta.finish_reason, delta.failure = end.finish_reason, end.failure


def newest(engine: Scheduler, *drafts: list[int]) -> Unmasked:
    return Unmasked(engine.in_flight[-1].plan, engine.in_flight[-1].seqs, [SpanDrafts(one) for one in drafts])


def allowed(mask: bytes) -> set[int]:
    return {t for t in range(WIDTH) if mask[t // 8] >> t % 8 & 1}


def test_each_sequence_has_its_own_mask(structured: StructuredOutput) -> None:
    engine = scheduler()
    begin(structured, engine, *(request(number, regex="abcdefg"[number] + "+") for number in range(7)))
    masks = masks_of(structured, engine)
    assert len(set(masks)) == 7
    assert all(allowed(mask) and not allowed(mask) & {0, 2} for mask in masks)  # no end before the first letter


def test_tokens_move_the_right_matcher(structured: StructuredOutput) -> None:
    engine = scheduler()
    begin(structured, engine, request(0, regex="ab?"), request(1, regex="ab?"))
    before = masks_of(structured, engine)
    assert before[0] == before[1]
    unmasked = newest(engine)
    follow(structured, [SeqDelta("r1", 0, [min(allowed(before[0]))])], engine, unmasked)
    after = bytes(structured.masks(unmasked).bits)
    assert after[:N_BYTES] == before[0] and after[N_BYTES:] != before[0]


def test_a_wrong_token_ends_its_sequence_with_an_error(structured: StructuredOutput) -> None:
    engine = scheduler()
    begin(structured, engine, request(0, regex="a+"))
    wrong = min(set(range(3, WIDTH)) - allowed(masks_of(structured, engine)[0]))
    delta = SeqDelta("r0", 0, [wrong])
    follow(structured, [delta], engine)
    assert delta.failure is not None and delta.failure.code is Code.GRAMMAR_FAILED and structured.n_live == 0
    assert not engine.live.requests


def test_a_complete_text_stops(structured: StructuredOutput) -> None:
    engine = scheduler()
    begin(structured, engine, request(0, choice=["a"]))
    delta = SeqDelta("r0", 0, [min(allowed(masks_of(structured, engine)[0]))])
    follow(structured, [delta], engine)
    assert delta.finish_reason is FinishReason.STOP and delta.failure is None and structured.n_live == 0


def test_requests_that_leave_take_their_matchers_along(structured: StructuredOutput) -> None:
    structured.admit(request(0, regex="never seen [a-z]+"))
    structured.drop("r0")
    assert structured.n_compiling == 0 and structured.ready(0.0) == []
    begin(structured, scheduler(), request(1, n=3, regex="a+"))
    structured.drop_seq("r1", 1)
    assert structured.n_live == 2
    structured.drop("r1")
    assert structured.n_live == 0


@pytest.mark.parametrize("n_drafts", [0, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_cancelled_at_any_step_under_the_strict_device(depth: int, n_drafts: int) -> None:
    """The null device refuses a plan behind one without its masks, and masks that nobody waits for."""
    structured = StructuredOutput(GrammarProcesses(settings()))
    for n_steps in range(8):
        clock = VirtualClock()
        config = SchedulerConfig(
            n_pages=65, page_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, pipeline_depth=depth,
            num_speculative_tokens=n_drafts,
        )  # fmt: skip
        device = NullExecutor(
            n_pages=65, page_size=4, max_num_seqs=8, max_model_len=64, vocab_size=WIDTH, clock=clock, acceptance=0.6,
            depth=depth,
        )  # fmt: skip
        core = EngineCore(Scheduler(config, clock), device, clock, depth, structured)
        free = Request(request_id="free", prompt_token_ids=[7], params=SamplingParams(), max_tokens=20, seed=1)
        core.handle(Submit(free))
        core.handle(Submit(request(0, regex="(ab|c)*d")))
        core.handle(Submit(request(1, regex="[a-z ]{3,}")))
        deltas = [delta for _ in range(n_steps) for delta in core.step()]
        core.handle(Cancel(["r0", "r1"]))
        while core.has_work():
            deltas += core.step()
        assert core.grammars.n_live == core.grammars.n_compiling == 0
        assert all(delta.failure is None for delta in deltas)
        assert sum(len(delta.token_ids) for delta in deltas if delta.request_id == "free") == 20
    structured.shutdown()


def test_without_a_tokenizer_nothing_is_constrained() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        StructuredOutput(None).admit(request(0, regex="a"))


def spell(tokenizer: HfTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


ENDINGS = {"crash": "SIGSEGV", "loop": "SIGPROF", "raise": "KeyError at faulty_matchers.py:", "kill": "SIGKILL"}


@pytest.mark.parametrize("fault", ENDINGS)
def test_the_guilty_fails_alone(tokenizer: HfTokenizer, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Matchers of nine requests; one of them ends the process when it is moved by a certain token. Its request fails,
    and the others' masks are what they are without it. A kill may come from outside: it takes two. The log says what
    has ended the process."""
    expected: list[list[bytes]] = []
    moves = [spell(tokenizer, "q"), spell(tokenizer, "x")]
    assert all(len(tokens) == 1 for tokens in moves)
    for command in (COMMAND, (FAULTY, fault)):
        structured, engine = StructuredOutput(GrammarProcesses(settings(), command)), scheduler()
        requests = [request(i, regex="[a-wyz]+" if i == 4 else f"(x|[a-{'pqrstuvwz'[i]}])+") for i in range(9)]
        begin(structured, engine, *requests)
        masks_of(structured, engine)
        unmasked = newest(engine, *[moves[1]] * 9)
        follow(structured, [SeqDelta(f"r{i}", 0, moves[1]) for i in range(9) if i != 4], engine, unmasked)
        delta = SeqDelta("r4", 0, moves[0])
        others = [SeqDelta(f"r{i}", 0, moves[1]) for i in range(9) if i != 4]
        follow(structured, [*others[:3], delta, *others[3:]], engine, unmasked)
        bits = bytes(structured.masks(unmasked).bits)
        assert len(bits) == 18 * N_BYTES, "each has a draft"
        found = [bits[i * 2 * N_BYTES : (i + 1) * 2 * N_BYTES] for i in range(9) if i != 4]
        expected.append(found)
        assert all(one.finish_reason is None for one in others)
        if command == COMMAND:
            assert delta.finish_reason is None
        else:
            code = "grammar_too_slow" if fault == "loop" else "grammar_failed"
            assert delta.failure is not None and delta.failure.code == code and "user's" not in delta.failure.message
            with pytest.raises(RequestError, match="has stopped the process"):
                structured.admit(requests[4])
        assert structured.n_live == (9 if command == COMMAND else 8)
        structured.shutdown()
    assert expected[0] == expected[1]
    assert f"a process of matchers has ended ({ENDINGS[fault]}" in caplog.text and "user's" not in caplog.text


def test_a_kill_from_outside_costs_nobody_anything(tokenizer: HfTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    structured, engine = StructuredOutput(GrammarProcesses(settings())), scheduler()
    begin(structured, engine, *(request(i, regex=f"x[a-{'pqrs'[i]}]+") for i in range(4)))
    masks_of(structured, engine)
    unmasked = newest(engine)
    deltas = [SeqDelta(f"r{i}", 0, spell(tokenizer, "x")) for i in range(4)]
    follow(structured, deltas, engine, unmasked)
    before = bytes(structured.masks(unmasked).bits)
    for child in children_of(structured):
        with contextlib.suppress(psutil.NoSuchProcess):  # the first process ends the others when one is gone
            child.kill()
    structured._made = None
    assert bytes(structured.masks(unmasked).bits) == before
    others = children_of(structured)
    assert others and structured._links is not None
    MARKS.pack_into(structured._links._links[0]._memory, 0, 2, 0)  # the second request was worked on just then
    os.kill(first_of(structured).pid, signal.SIGKILL)  # with it, the other goes
    psutil.wait_procs(others)
    assert bytes(structured.masks(unmasked).bits) == before
    assert all(delta.failure is None for delta in deltas) and structured.n_live == 4
    structured.shutdown()
    assert "has ended (the process that it comes from ended: SIGKILL" in caplog.text, "it could say no word itself"


def first_of(structured: StructuredOutput) -> psutil.Process:
    assert structured._processes is not None and structured._processes._process is not None
    return psutil.Process(structured._processes._process.pid)


def children_of(structured: StructuredOutput) -> list[psutil.Process]:
    try:
        return first_of(structured).children()
    except psutil.NoSuchProcess:
        return []


def test_nothing_is_left_behind() -> None:
    """Also when a child loops: the end of the engine's side ends them all."""
    processes = GrammarProcesses(settings(compile_s=3000.0))
    looping = GrammarTrials(processes)
    params = StructuredOutputsParams(grammar='%ignore /a+/\nstart: "a" "a"')
    looping.submit(*key_of(params), params, "")
    assert processes._process is None or processes._process.pid
    while processes._process is None or not psutil.Process(processes._process.pid).children():
        time.sleep(0.01)
    (child,) = psutil.Process(processes._process.pid).children()
    looping.close()
    processes.close()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


def test_a_killed_trial_says_what_killed_it() -> None:
    processes = GrammarProcesses(settings(compile_s=3000.0))
    looping = GrammarTrials(processes)
    params = StructuredOutputsParams(grammar='%ignore /a+/\nstart: "a" "a"')
    future = looping.submit(*key_of(params), params, "")
    while processes._process is None or not psutil.Process(processes._process.pid).children():
        time.sleep(0.01)
    processes._process.kill()
    assert "the process that it comes from ended: SIGKILL" in str(future.exception(60))
    looping.close()
    processes.close()


CHAIN = 6000
ENDS_A_PROCESS: dict[str, dict[str, Any]] = {
    "chain of references": {
        "json": {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(CHAIN)} | {f"d{CHAIN}": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    },
    "chain of rules": {"grammar": "\n".join(f"r{i}: r{i + 1}" for i in range(CHAIN)) + f'\nr{CHAIN}: "x"\nstart: r0'},
    "forced text": {"grammar": '%ignore /a+/\nstart: "a" "a"'},
    "loop while it is followed": {"grammar": '%ignore / +/\nstart: /[b-d]{3}/ " " /x/'},
}


@pytest.mark.parametrize("kind", ENDS_A_PROCESS.values(), ids=ENDS_A_PROCESS.keys())
def test_what_ended_a_server_is_refused(kind: dict[str, Any]) -> None:
    structured = StructuredOutput(GrammarProcesses(settings(compile_s=1.0)))
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            structured.check(StructuredOutputsParams(**kind))
        assert caught.value.code == "invalid_grammar" and "make it smaller" in caught.value.message
    structured.check(StructuredOutputsParams(regex="a"))
    structured.shutdown()


def test_memory_of_a_trial_is_limited() -> None:
    many = {f"property number {i}": {"type": "string"} for i in range(5000)}
    params = StructuredOutputsParams(json={"type": "object", "properties": many, "required": list(many)})
    for n_bytes, fits in ((8 << 20, False), (1 << 30, True)):
        structured = StructuredOutput(GrammarProcesses(settings(compile_bytes=n_bytes, compile_s=60.0)))
        if fits:
            structured.check(params)
        else:
            with pytest.raises(RequestError, match=r"smaller|cannot be compiled"):
                structured.check(params)
        structured.shutdown()


def test_what_ends_with_its_first_token_is_refused() -> None:
    """Thousands of optional properties compile, but are more than the parser follows."""
    structured = StructuredOutput(GrammarProcesses(settings(compile_s=60.0)))
    optional = {f"p{i}": {"type": "string"} for i in range(3000)}
    with pytest.raises(RequestError, match="items"):
        structured.check(StructuredOutputsParams(json={"type": "object", "properties": optional}))
    structured.shutdown()


def test_a_grammar_that_loops_late_takes_only_its_request_along(tokenizer: HfTokenizer) -> None:
    structured, engine = StructuredOutput(GrammarProcesses(settings())), scheduler()
    begin(structured, engine, request(0, grammar=LOOPS_LATE), request(1, regex="[a-z]+"))
    masks_of(structured, engine)
    unmasked = newest(engine)
    other = SeqDelta("r1", 0, spell(tokenizer, "x"))
    failed = None
    for token in spell(tokenizer, "hello"):
        delta = SeqDelta("r0", 0, [token])
        follow(structured, [delta, other], engine, unmasked)
        structured.masks(unmasked)
        failed = delta.failure
    if failed is None:  # it showed in the mask, after the move
        delta = SeqDelta("r0", 0, [2])
        follow(structured, [delta], engine)
        failed = delta.failure
    assert failed is not None and failed.code is Code.GRAMMAR_TOO_SLOW
    assert other.failure is None and structured.n_live == 1
    structured.shutdown()


def test_a_grammar_that_loops_along_a_draft_goes_on_without(tokenizer: HfTokenizer) -> None:
    """Nobody has said that; whoever asks for this grammar from now on has it, and no masks along drafts either."""
    structured, engine = StructuredOutput(GrammarProcesses(settings())), scheduler()
    one, other = request(0, grammar=LOOPS_LATE), request(1, regex="[a-z]+")
    begin(structured, engine, one, other)
    plain = masks_of(structured, engine)
    drafts = spell(tokenizer, "hello"), spell(tokenizer, "x")
    n_lines = [1 + len(tokens) for tokens in drafts]
    for _ in range(2):
        structured._made = None
        bits = bytes(structured.masks(newest(engine, *drafts)).bits)
        lines = [bits[at : at + N_BYTES] for at in range(0, len(bits), N_BYTES)]
        assert len(lines) == sum(n_lines) and [lines[0], lines[n_lines[0]]] == plain
        assert not any(map(any, lines[1 : n_lines[0]])), "no draft of it counts"
        assert allowed(lines[-1]), "the other's do"
    assert structured.n_live == 2 and len(children_of(structured)) == 1
    delta = SeqDelta("r0", 0, spell(tokenizer, "b"))
    follow(structured, [delta], engine)
    assert delta.finish_reason is None
    (process,) = children_of(structured)
    begin(structured, engine, request(2, grammar=LOOPS_LATE))
    assert engine.schedule() is not None
    bits = bytes(structured.masks(newest(engine, [], [], drafts[0])).bits)[2 * N_BYTES :]
    assert bits[:N_BYTES] == plain[0] and not any(bits[N_BYTES:]) and children_of(structured) == [process]
    structured.shutdown()


def test_who_waits_awake_hears_the_bell() -> None:
    """Messages of all sizes, several at once; a bell of what was received already says nothing."""
    bells = memoryview(bytearray(shared_bytes(0))).cast("q")
    ours, theirs = (Channel(end) for end in socket.socketpair())
    assert not ours.waits(0.0, 0.2), "there are no bells yet, and no message"
    ours.attach(bells, is_engine=True)
    theirs.attach(bells, is_engine=False)

    def answer() -> None:
        for number in range(50):
            assert theirs.waits(60.0, 0.001) and theirs.receive() == b"x" * number
            theirs.send(b"y" * number * 1000)
            if number % 3 == 0:
                theirs.send(b"z")

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        answering = thread.submit(answer)
        for number in range(50):
            ours.send(b"x" * number)
            assert ours.waits(60.0, 0.001) and ours.receive() == b"y" * number * 1000
            if number % 3 == 0:
                assert ours.waits(60.0, 0.001) and ours.receive() == b"z"
            assert not ours.waits(0.0, 1e-4)
        answering.result(60)
    assert ours._n_received == bells[BELLS[1]] == 67 and bells[BELLS[0]] == 50
    ours.close()
    theirs.close()


class SlowTrials(GrammarTrials):
    """Trials that take as long as they are told to, or until an event, in the order in which they are made."""

    def __init__(self, seconds: dict[str, float | threading.Event]) -> None:
        super().__init__(GrammarProcesses(settings()))
        self.seconds = seconds
        self.order: list[str] = []

    def _try(self, params: StructuredOutputsParams) -> trials.Passed:
        name = str(params.regex)
        self.order.append(name)
        limit = self.seconds.get(name[0], 0.0)
        if isinstance(limit, threading.Event):
            assert limit.wait(60)
        else:
            time.sleep(limit)
        return trials.Passed("g" * 10, 0.0)


def submit(trials: GrammarTrials, regex: str, tenant: str = "") -> concurrent.futures.Future[trials.Passed]:
    params = StructuredOutputsParams(regex=regex)
    return trials.submit(*key_of(params), params, tenant)


def test_small_ones_do_not_wait_for_the_end_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_THREADS", 1)
    is_free = threading.Event()
    queue = SlowTrials({"h": is_free})
    heavy = [submit(queue, f"heavy{i:04}" + "x" * 20_000, "a") for i in range(6)]
    light = [submit(queue, f"light {tenant}", tenant) for tenant in "abc"]
    concurrent.futures.wait(light, 60)
    assert all(one.done() for one in light) and not any(one.done() for one in heavy)
    is_free.set()
    concurrent.futures.wait(heavy, 60)
    assert all(one.done() for one in heavy)
    queue.close()


def test_tenants_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_THREADS", 1)
    is_free = threading.Event()
    queue = SlowTrials({"h": is_free})
    heavy = [submit(queue, f"heavy{i:04}" + "x" * 20_000, "a") for i in range(3)]
    assert submit(queue, "light", "a").result(60)  # both threads are there, one of them is held
    queue._spent_s |= {"a": 5.0}
    other = submit(queue, "other" + "x" * 30_000, "b")
    queue._spent_s |= {"b": 0.0}
    is_free.set()
    concurrent.futures.wait([*heavy, other], 60)
    assert [name[:5] for name in queue.order if len(name) > 10] == ["heavy", "other", "heavy", "heavy"]
    queue.close()


def test_a_full_queue_is_busy_and_not_a_bad_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_THREADS", 1)
    monkeypatch.setattr(trials, "MAX_WAITING_OF_TENANT", 3)
    queue = SlowTrials({"h": 0.3})
    for i in range(3):
        submit(queue, f"heavy {i}", "a")
    with pytest.raises(GrammarsBusy):
        submit(queue, "one more", "a")
    assert submit(queue, "light", "b").result(60).grammar
    monkeypatch.setattr(trials, "WAIT_S", -1.0)
    with pytest.raises(GrammarsBusy, match="waited"):
        submit(queue, "late", "b").result(60)
    queue.close()


def test_a_tenant_whose_grammars_end_processes_gets_no_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SlowTrials({})
    known = submit(queue, "known", "a").result(60)
    for number in range(trials.MAX_STRIKES):
        queue.ban(number.to_bytes(16, "big"), "a", "regex", "it loops")
    with pytest.raises(GrammarsBusy, match="taken again in"):
        submit(queue, "new", "a")
    assert queue.passed(key_of(StructuredOutputsParams(regex="known"))[0]) == known
    assert submit(queue, "new", "b").result(60)
    choice = StructuredOutputsParams(choice=["new"])  # another kind, perhaps of somebody else, where there are no keys
    assert queue.submit(*key_of(choice), choice, "a").result(60)
    monkeypatch.setattr(trials, "BAN_S", 0.0)
    assert submit(queue, "newer", "a").result(60)
    queue.close()


def test_what_has_passed_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MAX_PASSED_BYTES", 50)
    queue = SlowTrials({})
    for number in range(20):
        submit(queue, f"number {number}").result(60)
        assert queue._passed_bytes == sum(len(one.grammar) for one in queue._passed.values()) <= 50
    assert queue.passed(key_of(StructuredOutputsParams(regex="number 0"))[0]) is None
    queue.close()


@pytest.mark.parametrize("limits, limit_s, code", [
    ({"queue_limit_s": 5.0}, 5.0, Code.QUEUE_TIMEOUT),
    ({"queue_limit_s": 9.0, "time_limit_s": 7.0}, 7.0, Code.REQUEST_TIMEOUT),
])  # fmt: skip
def test_nobody_waits_longer_for_a_grammar_than_it_may(
    limits: dict[str, float], limit_s: float, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarTrials, "submit", lambda *_: concurrent.futures.Future())  # one that never ends
    clock, structured = VirtualClock(), StructuredOutput(GrammarProcesses(settings()))
    core = EngineCore(scheduler(), AsleepExecutor(), clock, 1, structured)
    for number, terms in enumerate((Terms(**limits), Terms())):
        core.handle(Submit(msgspec.structs.replace(request(number, regex="ab"), terms=terms)))
    clock.advance(limit_s - 0.5)
    assert core.step() == [] and structured.n_compiling == 2
    clock.advance(0.5)
    (end,) = core.step()
    assert end.request_id == "r0" and end.failure is not None and end.failure.code == code
    assert f"not ready within {limit_s:g} s" in end.failure.message
    assert structured.n_compiling == 1, "without a limit it may wait for ever"
    core.shutdown()


def test_the_wait_for_a_grammar_counts_afterwards() -> None:
    clock, structured = VirtualClock(), StructuredOutput(GrammarProcesses(settings()))
    structured.clock, made = clock, request(0, regex="ab")
    made.terms = Terms(queue_limit_s=5.0, time_limit_s=100.0)
    structured.admit(made)
    clock.advance(3)
    while structured.n_compiling:
        assert all(error is None for _, error in structured.ready(1.0))
    assert (made.terms.queue_limit_s, made.terms.time_limit_s) == (2.0, 97.0)
    structured.shutdown()
