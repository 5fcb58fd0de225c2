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

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.compute import platform
from quire.compute.draft.drafter import EachSequence
from quire.compute.platform import CudaPlatform
from quire.core.commands import Cancel, Submit
from quire.core.plan import StepPlan
from quire.engine import build
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor

END = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "catalogue", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"json": PERSON},
    "tight schema": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": "[a-c]{3,9}-(\\d\\d|x+)"},
    "choice": {"choice": ["alpha", "alphabet", "beta", "be"]},
    "lark": {"grammar": 'start: "a" rest\nrest: /[0-9]{2,12}/'},
    "gbnf": {"grammar": 'root ::= ("x" | "y")+ "!"'},
    "late": {"regex": "ab+", "begins_after": ".", "begins_within": 6},
    "late and free": {"begins_after": ".!", "begins_within": 4},
    "free": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 12, "structured_outputs": StructuredOutputsParams(regex="[a-z]*")},
    "stop": {"stop": ["b"], "structured_outputs": StructuredOutputsParams(regex="[a-c]{2,40}")},
    "stop that never comes": {"stop": ["yy"], "structured_outputs": StructuredOutputsParams(regex="ab(cd|efg)+[xz]")},
    "several": {"n": 3, "structured_outputs": StructuredOutputsParams(regex="[a-c]{2,40}")},
    "logprobs": {"logprobs": 2, "structured_outputs": StructuredOutputsParams(json=PERSON)},
    "penalties": {"presence_penalty": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-e]{9}")},
    "nothing is left": {"allowed_token_ids": [65, 66], "structured_outputs": StructuredOutputsParams(regex="[ab]{9}c")},
    "bias": {"logit_bias": {70: 4.0}, "structured_outputs": StructuredOutputsParams(regex="[A-Z]{2,20}x")},
}


class Teller:
    """Knows what plain decoding said, tells the truth with a chance that goes with the place, and goes on behind the
    end, which must not count."""

    def __init__(self, wholes: list[list[int]], chance: float) -> None:
        self._wholes, self._chance = wholes, chance
        self.n_asked = 0

    def open(self, slot: int, salt: str, prompt_len: int) -> None: ...

    def close(self, slot: int, tokens: np.ndarray) -> None: ...

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        known = tokens.tolist()
        whole = next((one for one in self._wholes if one[: len(known)] == known), None)
        assert whole is not None, f"the token table holds {bytes(max(0, t - 1) for t in known)}"
        found = []
        for at in range(len(known), len(known) + n):
            is_right = random.Random(f"{whole[:4]} {at}").random() < self._chance
            said = whole[at] if at < len(whole) else END
            found.append(said if is_right else (said + 1) % 256)
        self.n_asked += n
        return found


def wishes() -> tuple[list[str], list[SamplingParams]]:
    """Each kind greedily and at random; every prompt another one."""
    made = []
    for i, kind in enumerate(KINDS.values()):
        for temperature in (0.0, 1.0):
            structured = StructuredOutputsParams(**kind) if kind else None
            made.append(SamplingParams(max_tokens=70, temperature=temperature, seed=i, structured_outputs=structured))
    made += [SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": 5} | one) for one in OTHERS.values()]
    return [f"{i:03} says" for i in range(len(made))], made


def engine(folder: pathlib.Path, **options: Any) -> LLM:
    options = {"max_num_seqs": 8, "max_model_len": 128, "block_size": 8} | options
    return LLM(str(folder), load_format="dummy", device="cpu", num_threads=1, **options)


def drafting(folder: pathlib.Path, most: int = 40, **options: Any) -> LLM:
    """most: of all sequences together, where several run."""
    llm = engine(folder, speculative_config={"method": "ngram", "num_speculative_tokens": most}, **options)
    llm.engine.scheduler.live.drafts.costs = None  # as many as there is room for
    return llm


def tell(llm: LLM, wholes: list[list[int]], chance: float) -> Teller:
    teller = Teller(wholes, chance)
    llm.engine.executor.worker.runner._lengths._drafter = EachSequence(teller)
    return teller


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(*wishes(), use_tqdm=False)
    assert llm.engine.grammars.n_live == 0 and llm.engine.grammars.n_compiling == 0
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs, one.failure and one.failure.code)
        for request in outputs
        for one in request.outputs
    ]


def wholes_of(llm: LLM, said: list[Any]) -> list[list[int]]:
    prompts = [llm.tokenizer.encode(one) for one, params in zip(*wishes(), strict=True) for _ in range(params.n)]
    return [[*prompt, *one[1]] for prompt, one in zip(prompts, said, strict=True)]


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


def check(llm: LLM, expected: list[Any], chances: tuple[float, ...]) -> None:
    """Drafts that are right, wrong, and by chance, which the engine shuts down after."""
    try:
        for chance in chances:
            before = llm.stats()
            teller = tell(llm, wholes_of(llm, expected), chance)
            for found, one in zip(answers(llm), expected, strict=True):
                assert found == one
            after = llm.stats()
            n_right = after.accepted_tokens - before.accepted_tokens
            assert teller.n_asked > 200 and (chance == 0.0) == (n_right == 0)
            if chance == 1.0 and not after.preemptions:
                assert n_right > 0.6 * sum(len(one[1]) for one in expected), "right drafts count"
    finally:
        llm.shutdown()


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


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("captures", [True, False])
def test_a_device_apart(folder: pathlib.Path, captures: bool, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which launches a step at once, and the choice of its tokens when the masks have come."""
    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", DeviceApart)
    apart = CudaPlatform(captures=captures)
    monkeypatch.setattr(build, "platform_of", lambda config: apart)
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 60, "pipeline_depth": depth}
    llm = engine(folder, **options)
    expected = answers(llm)
    llm.shutdown()
    check(drafting(folder, **options), expected, (0.6, 1.0))


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


def test_hundreds_of_answers_fit_their_schemas(folder: pathlib.Path) -> None:
    """With drafts from earlier answers; most texts are those of a model that says anything."""
    suffix = {"method": "suffix", "num_speculative_tokens": 60, "suffix_decoding_min_token_prob": 0}
    llm = engine(folder, speculative_config=suffix, max_num_seqs=16, max_model_len=256)
    llm.engine.scheduler.live.drafts.costs = None
    made = list(schemas(500))
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
    assert stats.accepted_tokens > 1000 and stats.accepted_tokens < stats.draft_tokens


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


@pytest.mark.parametrize("make", [LaunchExecutor, ThreadExecutor])
def test_steps_that_fail_while_masks_are_waited_for(
    folder: pathlib.Path, plain: list[Any], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after the engine has heard of their drafts: what did not fit is computed again, and says the same."""
    monkeypatch.setattr(build, "_executor", lambda worker: make(worker))
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
