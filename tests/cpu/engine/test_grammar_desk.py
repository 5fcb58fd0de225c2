"""The desk of matchers: masks in threads equal those of one, whatever their number."""

from __future__ import annotations

import pathlib

import pytest

import quire
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.errors import RequestError
from quire.core.events import Cancel, SeqDelta, Submit
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine import grammars
from quire.engine.core import EngineCore
from quire.engine.executors.null import NullExecutor
from quire.engine.grammars import GrammarDesk
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.tokenizer import HfTokenizer

WIDTH = 4096
N_BYTES = WIDTH // 8


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    folder = pathlib.Path(quire.__file__).parent / "_models" / "demo"
    return GrammarCompiler(HfTokenizer.load(folder), WIDTH, [2, 0])


def scheduler() -> Scheduler:
    config = SchedulerConfig(n_pages=65, page_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64)
    return Scheduler(config, VirtualClock())


def request(number: int, regex: str, n: int = 1) -> Request:
    params = SamplingParams(n=n, structured_outputs=StructuredOutputsParams(regex=regex))
    return Request(
        request_id=f"r{number}", prompt_token_ids=[5, 6], params=params, max_tokens=8, seed=number,
        grammar=grammar_of(params.structured_outputs) if params.structured_outputs else "",
    )  # fmt: skip


def begin(desk: GrammarDesk, one: Request) -> None:
    if not desk.admit(one):
        while desk.n_compiling:
            assert all(error is None for _, error in desk.ready(1.0))


def masks_of(desk: GrammarDesk, engine: Scheduler) -> list[bytes]:
    plan = engine.schedule()
    assert plan is not None and plan.masked == list(range(len(plan.spans)))
    bits = bytes(desk.masks(plan, engine.in_flight[-1].seqs).bits)
    return [bits[at : at + N_BYTES] for at in range(0, len(bits), N_BYTES)]


def test_neither_threads_nor_timing_matter(compiler: GrammarCompiler) -> None:
    found = []
    for n_threads, n_timed in ((1, 0), (3, 0), (3, 1)):
        desk, engine = GrammarDesk(compiler, n_threads), scheduler()
        desk._n_timed = n_timed
        for number in range(7):
            one = request(number, "abcdefg"[number] + "+")
            begin(desk, one)
            engine.submit(one)
        found.append(masks_of(desk, engine))
        desk.shutdown()
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 7
    allowed = [{t for t in range(WIDTH) if mask[t // 8] >> t % 8 & 1} for mask in found[0]]
    assert all(tokens and not tokens & {0, 2} for tokens in allowed)  # no end before the first letter


def test_tokens_move_the_right_matcher(compiler: GrammarCompiler) -> None:
    desk, engine = GrammarDesk(compiler), scheduler()
    for number in range(2):
        one = request(number, "ab?")
        begin(desk, one)
        engine.submit(one)
    before = masks_of(desk, engine)
    assert before[0] == before[1]
    token = next(t for t in range(WIDTH) if before[0][t // 8] >> t % 8 & 1)
    desk.follow([SeqDelta("r1", 0, [token])], engine)
    after = bytes(desk.masks(engine.in_flight[-1].plan, engine.in_flight[-1].seqs).bits)
    assert after[:N_BYTES] == before[0] and after[N_BYTES:] != before[0]


def test_a_wrong_token_ends_its_sequence_with_an_error(compiler: GrammarCompiler) -> None:
    desk, engine = GrammarDesk(compiler), scheduler()
    one = request(0, "a+")
    begin(desk, one)
    engine.submit(one)
    mask = masks_of(desk, engine)[0]
    wrong = next(t for t in range(3, WIDTH) if not mask[t // 8] >> t % 8 & 1)
    delta = SeqDelta("r0", 0, [wrong])
    desk.follow([delta], engine)
    assert delta.error is not None and delta.error.startswith("grammar_failed: ") and desk.n_live == 0
    assert not engine.roster.requests


def test_slow_masks_end_their_sequence(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MASK_S", -10.0)
    desk, engine = GrammarDesk(compiler), scheduler()
    one = request(0, "a+")
    begin(desk, one)
    engine.submit(one)
    mask = masks_of(desk, engine)[0]
    token = next(t for t in range(WIDTH) if mask[t // 8] >> t % 8 & 1)
    delta = SeqDelta("r0", 0, [token])
    desk.follow([delta], engine)
    assert delta.error is not None and delta.error.startswith("grammar_too_slow: ")


def test_requests_that_leave_take_their_matchers_along(compiler: GrammarCompiler) -> None:
    desk = GrammarDesk(compiler)
    desk.admit(request(0, "never seen [a-z]+"))
    desk.drop("r0")
    assert desk.n_compiling == 0 and desk.ready(0.0) == []
    begin(desk, request(1, "a+", n=3))
    desk.drop_seq("r1", 1)
    assert desk.n_live == 2
    desk.drop("r1")
    assert desk.n_live == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_cancelled_at_any_step_under_the_strict_device(compiler: GrammarCompiler, depth: int) -> None:
    """The null device refuses a plan behind one without its masks, and masks that nobody waits for."""
    for n_steps in range(8):
        clock = VirtualClock()
        config = SchedulerConfig(
            n_pages=65, page_size=4, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, pipeline_depth=depth
        )
        device = NullExecutor(n_pages=65, page_size=4, max_num_seqs=8, max_model_len=64, vocab_size=WIDTH, clock=clock)
        core = EngineCore(Scheduler(config, clock), device, clock, depth, GrammarDesk(compiler))
        free = Request(request_id="free", prompt_token_ids=[7], params=SamplingParams(), max_tokens=20, seed=1)
        core.handle(Submit(free))
        core.handle(Submit(request(0, "(ab|c)*d")))
        core.handle(Submit(request(1, "[a-z ]{3,}")))
        deltas = [delta for _ in range(n_steps) for delta in core.step()]
        core.handle(Cancel(["r0", "r1"]))
        while core.has_work():
            deltas += core.step()
        assert core.grammars.n_live == core.grammars.n_compiling == 0
        assert all(delta.error is None for delta in deltas)
        assert sum(len(delta.token_ids) for delta in deltas if delta.request_id == "free") == 20


def test_without_a_tokenizer_nothing_is_constrained() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        GrammarDesk(None).admit(request(0, "a"))


def test_slow_masks_of_many_are_told_apart(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks made together are not timed; once they take too long they are made, and charged, one by one."""
    desk, engine = GrammarDesk(compiler), scheduler()
    for number in range(grammars.FEW):
        one = request(number, "a+")
        begin(desk, one)
        engine.submit(one)
    plan = engine.schedule()
    assert plan is not None and len(plan.masked) == grammars.FEW
    seqs = engine.in_flight[-1].seqs
    first = desk.masks(plan, seqs)
    assert desk._n_timed == 0
    monkeypatch.setattr(grammars, "MASK_S", -0.1)
    for _ in range(6):
        assert bytes(desk.masks(plan, seqs).bits) == bytes(first.bits)
    assert desk._n_timed == grammars.TIMED_STEPS - 3
    token = next(t for t in range(WIDTH) if first.bits[t // 8] >> t % 8 & 1)
    delta = SeqDelta("r2", 0, [token])
    desk.follow([delta], engine)
    assert delta.error is not None and delta.error.startswith("grammar_too_slow: ")
