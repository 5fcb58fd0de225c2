"""What a request should have taken, against the engine on a clock that takes exactly what the model says."""

from __future__ import annotations

import pathlib

import pytest

from quire.bench.shape import FOLDER
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.core.commands import Submit
from quire.core.events import Explanation
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.simulated import SimulatedEngine, SimulatedMachine
from quire.planner.expectation import ALONE, PROMPTS, QUEUE, SEQUENCES, first_token, later_token
from quire.planner.operators import decode_spans, prefill_spans

SHAPE = pathlib.Path(FOLDER) / "llama-3.1-8b"


def staged(n_stages: int) -> SimulatedMachine:
    config = EngineConfig(
        model=str(SHAPE), max_num_seqs=16, max_num_batched_tokens=2048, enable_prefix_caching=False,
        pipeline_parallel_size=n_stages,
    )  # fmt: skip
    return SimulatedMachine.of(config, read_arch(SHAPE), "h200", 141 << 30, is_server=False)


@pytest.fixture(scope="module")
def machine() -> SimulatedMachine:
    return staged(1)


def submit(engine: SimulatedEngine, name: str, n_in: int, n_out: int) -> None:
    params = SamplingParams(max_tokens=n_out, ignore_eos=True, detokenize=False)
    engine.core.handle(Submit(Request(
        request_id=name, prompt_token_ids=[ord(name[0])] * n_in, params=params, max_tokens=n_out, seed=0,
        label=f"{name}-0",
    )))  # fmt: skip


def explained(engine: SimulatedEngine, name: str) -> Explanation:
    [found] = engine.core.scheduler.history.explain(name)
    return found


def finish(engine: SimulatedEngine) -> None:
    while engine.core.has_work():
        engine.core.step()


def test_a_request_alone_takes_what_it_takes_alone(machine: SimulatedMachine) -> None:
    engine = machine.engine()
    submit(engine, "a", 1000, 100)
    finish(engine)
    one = explained(engine, "a")
    first, later = first_token(machine.cost, one), later_token(machine.cost, one)
    assert first is not None and later is not None
    assert first.took_s == pytest.approx(first.expected_s, rel=0.01)
    assert first.parts_s[QUEUE] == 0 and first.parts_s[PROMPTS] == pytest.approx(0, abs=1e-5)
    assert later.n_tokens == 99 and later.took_s == pytest.approx(machine.cost.step_s(decode_spans(1, 1050)), rel=0.01)
    assert later.parts_s[ALONE] == pytest.approx(later.took_s, rel=0.01) and abs(later.rest_s) < 0.01 * later.took_s


def test_what_others_add_is_named(machine: SimulatedMachine) -> None:
    """Seven sequences decode beside it, and a prompt of 8,192 tokens comes in four steps of its output."""
    engine = machine.engine()
    for name in "bcdefgh":
        submit(engine, name, 900, 400)
    for _ in range(20):
        engine.core.step()
    submit(engine, "a", 1000, 100)
    while explained(engine, "a").first_token_s is None:
        engine.core.step()
    for _ in range(40):
        engine.core.step()
    submit(engine, "z", 8192, 10)
    finish(engine)
    one = explained(engine, "a")
    first, later = first_token(machine.cost, one), later_token(machine.cost, one)
    assert first is not None and later is not None
    assert abs(later.rest_s) < 0.03 * later.took_s
    alone_s, beside_s = (machine.cost.step_s(decode_spans(n, 1050)) for n in (1, 8))
    assert later.parts_s[ALONE] == pytest.approx(alone_s, rel=0.01)
    assert later.parts_s[SEQUENCES] == pytest.approx(beside_s - alone_s, rel=0.1)
    z = explained(engine, "z")
    assert z.first_token_s is not None
    assert later.parts_s[PROMPTS] * 99 == pytest.approx(z.first_token_s, rel=0.3)
    assert abs(first.rest_s + machine.cost.first_token_s) < 0.1 * first.took_s


def test_a_queue_is_the_steps_of_others(machine: SimulatedMachine) -> None:
    """Sixteen slots are taken for 200 tokens; the seventeenth request waits for one."""
    engine = machine.engine()
    for i in range(16):
        submit(engine, f"{chr(98 + i)}", 300, 200)
    for _ in range(10):
        engine.core.step()
    submit(engine, "a", 300, 1)
    finish(engine)
    one = explained(engine, "a")
    first = first_token(machine.cost, one)
    assert first is not None and later_token(machine.cost, one) is None
    assert one.admitted_s is not None and one.admitted_s > 0.5
    assert first.parts_s[QUEUE] == pytest.approx(one.admitted_s, rel=0.03)
    assert abs(first.rest_s) < 0.03 * first.took_s


@pytest.mark.parametrize("n_stages", [2, 4])
def test_a_request_alone_leaves_all_stages_but_one_idle(n_stages: int) -> None:
    """A token goes through all of them before the next one begins; of a prompt's chunks only the last waits."""
    machine = staged(n_stages)
    engine = machine.engine()
    submit(engine, "a", 6000, 100)
    finish(engine)
    first, later = (of(machine.cost, explained(engine, "a")) for of in (first_token, later_token))
    assert first is not None and later is not None
    assert later.took_s == pytest.approx(n_stages * machine.cost.step_s(decode_spans(1, 6050)), rel=0.01)
    assert later.parts_s[ALONE] == pytest.approx(later.took_s, rel=0.01) and abs(later.rest_s) < 0.01 * later.took_s
    assert first.took_s + machine.cost.first_token_s == pytest.approx(first.expected_s, rel=0.03)
    assert first.took_s < 0.8 * 135e-3, "stages compute chunks beside each other"


@pytest.mark.parametrize("n_stages", [2, 4])
def test_what_others_add_in_a_pipeline(n_stages: int) -> None:
    """Seven sequences fill the stages; four chunks of a prompt then stop all, the last in each stage."""
    machine = staged(n_stages)
    engine = machine.engine()
    for name in "bcdefgh":
        submit(engine, name, 900, 400)
    for _ in range(40):
        engine.core.step()
    submit(engine, "a", 1000, 100)
    while explained(engine, "a").first_token_s is None:
        engine.core.step()
    for _ in range(40):
        engine.core.step()
    submit(engine, "z", 8192, 10)
    finish(engine)
    later = later_token(machine.cost, explained(engine, "a"))
    assert later is not None and abs(later.rest_s) < 0.05 * later.took_s
    alone_s = n_stages * machine.cost.step_s(decode_spans(1, 1050))
    assert later.parts_s[ALONE] == pytest.approx(alone_s, rel=0.03)
    chunk_s = machine.cost.step_s(prefill_spans(2048))  # where chunks begin is not remembered
    assert later.parts_s[PROMPTS] * 99 == pytest.approx((4 + n_stages - 1) * chunk_s, rel=0.25)
