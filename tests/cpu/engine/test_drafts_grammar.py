"""Drafts of sequences under a grammar: the tokens are those without drafts, whoever guesses what."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import byte_model
import jsonschema
import numpy as np
import pytest
from calling_device import CallingDevice, LivePlans
from grammar_draft_cases import answers, check, drafting, engine, tell, wholes_of, wishes

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.compute import platform
from quire.compute.draft.drafter import EachSequence
from quire.compute.platform import CudaPlatform
from quire.compute.runner.runner import Runner
from quire.core.commands import Cancel, Submit
from quire.core.errors import EngineError
from quire.core.plan import StepPlan
from quire.engine import build, workers
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return byte_model.make(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def plain(folder: pathlib.Path) -> Iterator[list[Any]]:
    llm = engine(folder)
    said = answers(llm)
    llm.shutdown()
    reasons = {one[2] for one in said}
    assert {"stop", "length", "error"} <= reasons, "the cases are of every sort"
    yield said


@pytest.mark.parametrize("few_pages", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_answers_are_those_without_drafts(
    folder: pathlib.Path, plain: list[Any], depth: int, few_pages: bool
) -> None:
    """Few pages: some are preempted between their drafts."""
    llm = drafting(folder, pipeline_depth=depth, num_gpu_blocks_override=40 if few_pages else 0)
    check(llm, plain, (0.0, 0.6, 1.0))
    assert (llm.stats().preemptions > 0) == few_pages


class DeviceApart(CallingDevice):
    """As a GPU, of which nobody asks how much memory it has."""


APART: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 60}


def set_apart(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", DeviceApart)
    apart = CudaPlatform(captures=captures)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: apart)


@pytest.fixture(scope="module")
def plain_apart(folder: pathlib.Path) -> list[Any]:
    """Without drafts, operation by operation, a step at a time."""
    with pytest.MonkeyPatch.context() as patched:
        set_apart(patched, captures=False)
        llm = engine(folder, pipeline_depth=1, **APART)
        said = answers(llm)
        llm.shutdown()
    return said


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("captures", [True, False])
def test_a_device_apart(
    folder: pathlib.Path, plain_apart: list[Any], captures: bool, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which launches a step at once, and the choice of its tokens when the masks have come."""
    set_apart(monkeypatch, captures)
    check(drafting(folder, pipeline_depth=depth, **APART), plain_apart, (0.6, 1.0))


@pytest.mark.parametrize("depth", [2, 3])
def test_what_is_staged_while_masks_are_made_is_what_is_launched(
    folder: pathlib.Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps; not those that open or close slots, nor before their graphs are captured."""
    set_apart(monkeypatch, captures=True)
    stage, said, n_staged = Runner.stage, list[list[Any]](), 0

    def counted(runner: Runner, plan: StepPlan) -> Any:
        nonlocal n_staged
        found = stage(runner, plan)
        n_staged += found is not None
        return found

    for each in (counted, lambda runner, plan: None):
        monkeypatch.setattr(Runner, "stage", each)
        llm = engine(folder, pipeline_depth=depth, **APART)
        said.append(answers(llm) + answers(llm))
        n_steps = llm.stats().steps
        llm.shutdown()
    assert said[0] == said[1] and n_staged > n_steps // 3, (n_staged, n_steps)


def schemas(n: int) -> Iterator[dict[str, Any]]:
    """Small bounded ones, all different."""
    chance = random.Random(0)
    for i in range(n):
        properties: dict[str, Any] = {f"number {i}": {"type": "integer", "minimum": 0, "maximum": 10 ** (1 + i % 6)}}
        for name in chance.sample(["name", "names", "na", "colour", "is_on", "of"], 3):
            properties[name] = chance.choice([
                {"type": "string", "maxLength": 1 + i % 7},
                {"enum": [f"{'ab' * k}{i % 9}" for k in range(1, 4)]},
                {"type": "boolean"},
                {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 3},
                {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False},
            ])  # fmt: skip
        required = [one for one in properties if chance.random() < 0.8]
        yield {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize(("n", "branching"), [(500, 1), (120, 3)])
def test_hundreds_of_answers_fit_their_schemas(folder: pathlib.Path, n: int, branching: int) -> None:
    """With drafts from earlier answers, chains and trees; most texts are those of a model that says anything."""
    suffix = {"method": "suffix", "num_speculative_tokens": 60, "suffix_decoding_min_token_prob": 0}
    suffix |= {"branching": branching}
    llm = engine(folder, speculative_config=suffix, max_num_seqs=16, max_model_len=256)
    llm.engine.scheduler.live.drafts.costs = None
    made = list(schemas(n))
    params = [
        SamplingParams(
            max_tokens=240, temperature=1.0 if i % 2 else 0.0, seed=i,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for i, schema in enumerate(made)
    ]  # fmt: skip
    outputs = llm.generate([f"{i:03}:" for i in range(len(made))], params, use_tqdm=False)
    stats = llm.stats()
    llm.shutdown()
    for schema, request in zip(made, outputs, strict=True):
        (one,) = request.outputs
        assert one.finish_reason == "stop", (schema, one.text, one.failure)
        jsonschema.validate(json.loads(one.text), schema)
    assert 4 * n < stats.accepted_tokens < stats.draft_tokens


class Silent:
    """Guesses nothing."""

    def open(self, slot: int, salt: str, prompt_len: int) -> None: ...

    def close(self, slot: int, tokens: np.ndarray) -> None: ...

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        return []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_where_a_grammar_leaves_no_choice_nobody_has_to_guess(folder: pathlib.Path, depth: int) -> None:
    """The first of such tokens takes a step, the others go with it; all are right, and the answers are the same."""
    made = list(schemas(12))
    params = [
        SamplingParams(
            max_tokens=100, temperature=float(i % 2), seed=i,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for i, schema in enumerate(made)
    ]  # fmt: skip
    prompts = [f"{i:03}:" for i in range(len(made))]
    said, n_steps = [], []
    for make in (engine, drafting):
        llm = make(folder, pipeline_depth=depth, max_num_seqs=2)
        if make is drafting:
            llm.engine.executor.worker.runner._lengths._drafter = EachSequence(Silent())
        before = llm.stats()
        said.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        after = llm.stats()
        n_steps.append(after.steps - before.steps)
        llm.shutdown()
    assert said[0] == said[1]
    assert after.draft_tokens > 300
    n_ends = len(made)  # a draft that ends its text brings no token behind it, by which drafts are counted
    assert after.draft_tokens - n_ends <= after.accepted_tokens <= after.draft_tokens
    assert n_steps[1] < 0.75 * n_steps[0]


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


@pytest.mark.parametrize("make", [LaunchExecutor, ThreadExecutor])
def test_steps_that_fail_while_masks_are_waited_for(
    folder: pathlib.Path, plain: list[Any], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the engine has heard of their drafts: what did not fit is computed again, and says the same."""
    monkeypatch.setattr(build, "_executor", lambda _, worker: make(worker))
    llm = drafting(folder)
    teller, runner = tell(llm, wholes_of(llm, plain), 0.6), llm.engine.executor.worker.runner
    real, n_drafted, errors = runner.launch, itertools.count(1), list[str]()

    def launch(plan: StepPlan, on_drafts: Any = None) -> Any:
        number = next(n_drafted) if on_drafts is not None else 0
        if number in (5, 40, 80):
            errors.append("before")
            raise OutOfMemoryError("CUDA out of memory")
        launched = real(plan, on_drafts)
        if number in (12, 60, 100):
            errors.append("after")
            raise OutOfMemoryError("CUDA out of memory")
        return launched

    monkeypatch.setattr(runner, "launch", launch)
    assert answers(llm) == plain
    assert teller.n_asked > 200 and errors == ["before", "after"] * 3
    runner.launch = lambda plan, on_drafts=None: real(plan, on_drafts) if on_drafts is None else 1 // 0
    assert [one[2] for one in answers(llm)].count("error") > 8
    runner.launch = real
    assert answers(llm) == plain
    llm.shutdown()


@pytest.mark.parametrize("where", ["masks", "follow"])
def test_nothing_hangs_or_is_lost_where_masks_cannot_be_made(
    folder: pathlib.Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What had ended by then says so; the others end with an error; the next requests are as ever."""
    llm = drafting(folder)
    tell(llm, wholes_of(llm, plain), 0.6)
    real, failed = getattr(llm.engine.grammars, where), list[bool]()

    def fail(*given: Any) -> Any:
        is_due = where == "masks" or any(delta.finish_reason is not None for delta in given[0])
        if not failed and is_due:
            failed.append(True)
            raise EngineError("no process for grammars can be started")
        return real(*given)

    monkeypatch.setattr(llm.engine.grammars, where, fail)
    found = answers(llm)
    assert failed and len(found) == len(plain)
    ended = [(one, expected) for one, expected in zip(found, plain, strict=True) if one[2] != "error"]
    assert len(found) - len(ended) >= 1 and all(one == expected for one, expected in ended)
    assert where == "masks" or ended, "the sequence that ended in this very step"
    assert answers(llm) == plain
    llm.shutdown()


@pytest.mark.parametrize("n_steps", range(0, 14, 2))
def test_cancelled_at_any_step(cancelled: LLM, plain: list[Any], n_steps: int) -> None:
    """The neighbours say what they say without, and no matcher is left."""
    prompts, params = wishes()
    made = [cancelled._input_processor.request(*one) for one in zip(prompts[:4], params[:4], strict=True)]
    for request in made:
        cancelled.engine.handle(Submit(request))
    names = [request.request_id for request in made]
    said: dict[str, list[int]] = {name: [] for name in names}

    def step() -> None:
        for delta in cancelled.engine.step():
            said[delta.request_id] += delta.token_ids

    while cancelled.engine.grammars.n_compiling:
        step()
    for _ in range(n_steps):
        step()
    cancelled.engine.handle(Cancel(names[::2]))
    while cancelled.engine.has_work():
        step()
    assert cancelled.engine.grammars.n_live == 0
    for at in (1, 3):
        assert said[names[at]] == plain[at][1]


@pytest.fixture(scope="module")
def cancelled(folder: pathlib.Path, plain: list[Any]) -> Iterator[LLM]:
    llm = drafting(folder)
    tell(llm, wholes_of(llm, plain), 0.6)
    yield llm
    llm.shutdown()
