"""Constrained output through a whole CPU engine on the demo model: schemas, overlap, preemption, cancelling."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
import byte_model
from schema_cases import CASES

from quire import LLM, SamplingParams
from quire.core.commands import Cancel, Submit
from quire.core.errors import InvalidParameter, RequestError
from quire.core.failure import Code
from quire.core.outputs import CompletionOutput
from quire.core.structured import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    llm = LLM(device="cpu", num_threads=1, max_num_seqs=64, max_model_len=1024)
    yield llm
    llm.shutdown()


def constrained(
    max_tokens: int = 200, seed: int = 0, temperature: float = 1.0, n: int = 1, **kind: Any
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        n=n,
        structured_outputs=StructuredOutputsParams(**kind),
    )


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[CompletionOutput]]:
    outputs = [one.outputs for one in llm.generate(prompts, params, use_tqdm=False)]
    assert llm.engine.grammars.n_live == 0 and llm.engine.grammars.n_compiling == 0
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_finished_output_fits_its_schema(demo: LLM, temperature: float) -> None:
    assert len(CASES) >= 200
    for schema in CASES:
        jsonschema.Draft202012Validator.check_schema(schema)
    params = [constrained(seed=i, temperature=temperature, json=schema) for i, schema in enumerate(CASES)]
    outputs = run(demo, ["Answer as JSON:"] * len(CASES), params)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    n_finished = 0
    for schema, (one,) in zip(CASES, outputs, strict=True):
        assert one.finish_reason in ("stop", "length"), (schema, one.failure)
        if one.finish_reason == "stop":
            n_finished += 1
            value = json.loads(one.text)
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator, format_checker=checker)
    assert n_finished >= 200


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ({"regex": "[a-z]{3}-\\d{2}"}, "[a-z]{3}-\\d{2}"),
        ({"choice": ["red", "green", 'b"lue']}, 'red|green|b"lue'),
        ({"grammar": 'start: "a" rest\nrest: /[0-9]{2,3}/'}, "a[0-9]{2,3}"),
        ({"grammar": 'root ::= "x" ("y" | "z") "!"'}, "x[yz]!"),
        ({"json_object": True}, "(?s)\\{.*\\}"),
        ({"json": json.dumps(PERSON)}, "(?s)\\{.*\\}"),
        ({"json": PERSON, "disable_any_whitespace": True}, '\\{\\S*"name":.*\\}'),
        ({"regex": "ab", "begins_after": "."}, "(?s).*?\\.\\s*ab"),
        ({"regex": "ab", "begins_after": ".", "may_begin_with": "<"}, "(?s)(<.*?\\.)?\\s*ab"),
    ],
)
def test_kinds(demo: LLM, kind: dict[str, Any], pattern: str) -> None:
    outputs = run(demo, ["Say:"] * 6, [constrained(seed=i, temperature=i / 3, max_tokens=80, **kind) for i in range(6)])
    finished = [one for (one,) in outputs if one.finish_reason == "stop"]
    assert finished
    for one in finished:
        assert re.fullmatch(pattern, one.text), one.text


@pytest.mark.parametrize("kind", [{}, {"regex": "ab"}, {"may_begin_with": "</think"}])
def test_reasoning_ends_at_its_budget(demo: LLM, kind: dict[str, Any]) -> None:
    """Beside neighbours without one; several in a step, and one after the other in a slot."""
    params = [constrained(max_tokens=24, seed=i, begins_after="</think>", begins_within=i, **kind) for i in range(6)]
    free = SamplingParams(max_tokens=24, temperature=0.0)
    outputs = run(demo, ["Say:"] * 7, [*params, free])
    assert outputs[-1][0].token_ids == run(demo, ["Say:"], [free])[0][0].token_ids
    for budget, (one,) in enumerate(outputs[:-1]):
        thought, mark, rest = one.text.partition("</think>")
        n_tokens = len(demo.tokenizer.encode(thought)) if thought else 0
        if "may_begin_with" in kind:
            assert not mark, "a text that does not begin so has no reasoning"
        else:
            assert mark and n_tokens <= budget + 1, (budget, one.text)
            said = rest.strip()
            assert "regex" not in kind or said == "ab" or (one.finish_reason == "length" and "ab".startswith(said))


def test_neighbours_do_not_matter(demo: LLM) -> None:
    """Constrained and free sequences in one batch: each says what it says alone, and the free ones are not held up."""
    alone = [run(demo, ["Bob is 31."], [constrained(seed=i, json=PERSON)])[0][0] for i in range(4)]
    free_params = SamplingParams(max_tokens=40, seed=5, temperature=1.0, ignore_eos=True)
    free = run(demo, ["def f(x):"], [free_params])[0][0]
    steps = demo.stats().steps
    mixed = run(
        demo, ["Bob is 31."] * 4 + ["def f(x):"], [*(constrained(seed=i, json=PERSON) for i in range(4)), free_params]
    )
    taken = demo.stats().steps - steps
    assert [one.token_ids for (one,) in mixed] == [*(one.token_ids for one in alone), free.token_ids]
    # A token in every step, masked or not; the free one may be through before the matchers are there.
    assert taken <= max(len(one.token_ids) for (one,) in mixed) + len(free.token_ids) + 4


def test_samples_have_their_own_matchers(demo: LLM) -> None:
    (several,) = run(demo, ["Bob is 31."], [constrained(n=5, seed=3, json=PERSON)])
    assert len({one.text for one in several}) > 1
    for one in several:
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), PERSON)
    for index, one in enumerate(several):
        (alone,) = run(demo, ["Bob is 31."], [constrained(seed=3 + index, json=PERSON)])
        assert alone[0].token_ids == one.token_ids


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_and_depth_do_not_matter(demo: LLM, depth: int) -> None:
    """A pool for a few sequences only: they are preempted and resumed, and say the same."""
    params = [constrained(seed=i, max_tokens=60, json=PERSON) for i in range(8)]
    prompts = [f"Person number {i} is:" for i in range(8)]
    expected = run(demo, prompts, params)
    small = LLM(
        device="cpu",
        num_threads=1,
        max_num_seqs=8,
        max_model_len=128,
        num_gpu_blocks_override=18,
        block_size=8,
        max_num_batched_tokens=16,
        pipeline_depth=depth,
    )
    try:
        found = run(small, prompts, params)
        assert small.stats().preemptions > 0
        assert [one.token_ids for (one,) in found] == [one.token_ids for (one,) in expected]
    finally:
        small.shutdown()


def test_cut_outputs_say_so(demo: LLM) -> None:
    ((one,),) = run(demo, ["Bob"], [constrained(max_tokens=5, json=PERSON)])
    assert one.finish_reason == "length" and len(one.token_ids) == 5
    params = SamplingParams(max_tokens=60, stop=['"age"'], structured_outputs=StructuredOutputsParams(json=PERSON))
    ((one,),) = run(demo, ["Bob"], [params])
    assert one.finish_reason == "stop" and one.stop_reason == '"age"'


def test_cancelled_requests_leave_nothing(demo: LLM) -> None:
    for n_steps in range(6):
        request = demo._input_processor.request("Bob is", constrained(n=2, json=PERSON))
        demo.engine.handle(Submit(request))
        for _ in range(n_steps):
            demo.engine.step()
        demo.engine.handle(Cancel([request.request_id]))
        while demo.engine.has_work():
            demo.engine.step()
        assert demo.engine.grammars.n_live == demo.engine.grammars.n_compiling == 0
    stream = demo.stream("Bob is", constrained(json=PERSON, max_tokens=100))
    next(stream)
    stream.close()
    assert demo.engine.grammars.n_live == 0


def test_streams_join_to_the_whole(demo: LLM) -> None:
    params = constrained(seed=1, json=PERSON)
    ((whole,),) = run(demo, ["Bob is 31."], [params])
    assert "".join(part.outputs[0].text for part in demo.stream("Bob is 31.", params)) == whole.text


@pytest.mark.parametrize(
    ("more", "ends"),
    [
        ({"allowed_token_ids": [5]}, "error"),
        ({"logit_bias": {5: 100}}, "stop"),  # a bias cannot bring back what the grammar excludes
        ({"bad_words": ["maybe"]}, "stop"),
        ({"min_tokens": 5}, "stop"),  # where nothing can follow, the text is over
        ({"presence_penalty": 2.0, "repetition_penalty": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, "stop"),
        ({"logprobs": 3}, "stop"),
    ],
)
def test_with_other_parameters(demo: LLM, more: dict[str, Any], ends: str) -> None:
    params = SamplingParams(max_tokens=10, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), **more)
    free = SamplingParams(max_tokens=10, temperature=0)
    (one,), (neighbour,) = run(demo, ["Is it?", "def f"], [params, free])
    assert one.finish_reason == ends
    if ends == "error":
        assert one.failure.code is Code.EMPTY_MASK
    else:
        assert one.text in ("yes", "no")
    assert neighbour.token_ids == run(demo, ["def f"], [free])[0][0].token_ids


def test_min_tokens_hold_the_end_back(demo: LLM) -> None:
    """The end is allowed from the first letter on; `min_tokens` excludes it until then."""
    params = SamplingParams(
        max_tokens=20, min_tokens=8, temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-z ]*x?")
    )
    ((one,),) = run(demo, ["Say:"], [params])
    assert len(one.token_ids) > 8


@pytest.mark.parametrize(
    "kind",
    [
        {"json": {"type": "hiccup"}},
        {"json": {"$ref": "http://example.com/x"}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": {"$ref": "#"}},
        {"json": {"enum": []}},
        {"json": False},
        {"json": {"not": {}}},
        {"json": "{"},
        {"json": "[]"},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"regex": "("},
        {"regex": "(" * 30_000 + "a" + ")" * 30_000},
        {"regex": "[^\\s\\S]"},
        {"regex": "(?=a)b"},
        {"regex": "(a)\\1"},
        {"regex": "a" * 40_000},
        {"grammar": "start: foo"},
        {"grammar": 'start: start "a"'},
        {"grammar": "x"},
        {"grammar": ""},
        {"grammar": "start: " + "(" * 5_000 + '"a"' + ")" * 5_000},
        {"choice": []},
        {"choice": ["a"], "regex": "b"},
        {},
        {"json": {"enum": [f"v{i}" for i in range(30_000)]}},
        {"choice": ["x"] * 20_000},
        {"choice": [""]},
        {"structural_tag": {"structures": [], "triggers": []}},
        {"structural_tag": {"format": {}}},
        {"json": {"type": "object"}, "begins_after": ""},
    ],
)
def test_bad_grammars_are_refused_at_once(demo: LLM, kind: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        demo.generate(["x"], constrained(**kind), use_tqdm=False)
    assert len(caught.value.message) < 900 and "/etc" not in caught.value.message.replace("file:///etc/passwd", "")


def test_deep_schemas_are_refused_without_recursion(demo: LLM) -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"items": deep}
    with pytest.raises(InvalidParameter, match="64 levels"):
        demo.generate(["x"], constrained(json=deep), use_tqdm=False)
    text = '{"items":' * 20_000 + "{}" + "}" * 20_000
    with pytest.raises(RequestError):
        demo.generate(["x"], constrained(json=text), use_tqdm=False)


@pytest.mark.parametrize(
    "kind",
    [
        {"json": {"type": "array", "minItems": 10**9}},
        {"json": {"type": "string", "minLength": 10**8}},
        {"regex": "(a{1000}){100}"},
        {"regex": "(a|b)*a(a|b){20}"},
        {"regex": "(((a{0,100}){0,100}){0,100}){0,100}"},
        {"grammar": 'start: "a" start "b" | start start | "a"'},
        {
            "json": {
                "type": "object",
                "properties": {f"k{i}": {"type": "string", "pattern": f"[a-z]{{{i}}}"} for i in range(300)},
            }
        },
    ],
)
def test_heavy_grammars_end_by_themselves(demo: LLM, kind: dict[str, Any]) -> None:
    """They compile; whether they go on or end with an error, the neighbour says what it says alone."""
    free = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    (one,), (neighbour,) = run(demo, ["aab", "def f"], [constrained(max_tokens=30, **kind), free])
    assert one.finish_reason in ("stop", "length", "error")
    if one.finish_reason == "error":
        assert one.failure.code in (Code.GRAMMAR_FAILED, Code.GRAMMAR_TOO_SLOW)
    assert neighbour.token_ids == run(demo, ["def f"], [free])[0][0].token_ids


def test_logits_beyond_the_tokenizer_are_never_chosen(tmp_path: Path) -> None:
    llm = LLM(str(byte_model.make(tmp_path)), load_format="dummy", device="cpu", num_threads=1)
    params = [constrained(max_tokens=40, seed=i, regex="[a-z]{4,30}[.]") for i in range(6)]
    free = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True) for i in range(3)]
    outputs = run(llm, ["ab"] * 9, params + free)
    for (one,) in outputs[:6]:
        assert one.finish_reason == "stop" and re.fullmatch("[a-z]{4,30}[.]", one.text)
    assert {len(one.token_ids) for (one,) in outputs[6:]} == {10}
    llm.shutdown()
