"""A sampling parameter has one home: flags and the HTTP schema follow the types of `SamplingParams`."""

from __future__ import annotations

import ast
import pathlib
from collections import Counter
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta, inspect

import quire
from quire.cli.sampling import NO_FLAGS, SamplingFlags, flags_of
from quire.config.options import describe, limit
from quire.core.errors import InvalidParameter
from quire.core.field_checks import bare
from quire.core.sampling import CHECKS, SamplingParams
from quire.serve.openai.responses_schema import ResponsesRequest
from quire.serve.openai.schema import ChatRequest, CompletionRequest
from quire.serve.ops.openapi_types import TypeSchemas, bounds_of

BODIES = (ChatRequest, CompletionRequest, ResponsesRequest)
WIDER = {("seed", "minimum"), ("max_tokens", "minimum")}
"""Negative seeds are folded; a completion with `echo` may have no token of its own."""
NUMBERS = {
    name: kind for name, whole in CHECKS.types.items()
    if isinstance(kind := bare(whole)[0], inspect.IntType | inspect.FloatType)
}  # fmt: skip


class _Other(SamplingParams):
    top_k: Annotated[int, Meta(ge=3, le=5, description="Another meaning.")] = 4
    repetition_penalty: Annotated[float, Meta(gt=0.25, le=0.5, description="Another one.")] = 0.5


def _said(kind: Any) -> dict[str, float]:
    words = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
    return {word: getattr(kind, key) for key, word in words.items() if getattr(kind, key) is not None}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_http_schema_has_the_bounds_of_the_type(name: str) -> None:
    schemas = TypeSchemas(("m",))
    n_bodies = 0
    for body in BODIES:
        schemas.of(body)
        said = schemas.components[body.__name__]["properties"].get(name)
        if said is None or said["type"] == ["boolean", "null"]:  # chat's own `logprobs`
            continue
        n_bodies += 1
        for word, bound in _said(NUMBERS[name]).items():
            assert said[word] == bound or (name, word) in WIDER, (body, word)
    assert n_bodies


@pytest.mark.parametrize("name", sorted(NUMBERS.keys() - NO_FLAGS))
def test_a_flag_has_the_bounds_of_the_type(name: str) -> None:
    (option,) = [one for one in describe(SamplingFlags) if one.name == name]
    assert _said(option.item_kind) == _said(NUMBERS[name]) and option.meaning


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_bound_are_let_through_and_what_is_beyond_is_not(name: str) -> None:
    kind = NUMBERS[name]
    assert isinstance(kind, inspect.IntType | inspect.FloatType)
    more = {"max_tokens": None} if name == "min_tokens" else {}
    for bound, beyond in ((kind.ge, -1), (kind.le, 1)):
        if bound is not None:
            SamplingParams(**{name: bound, **more})
            with pytest.raises(InvalidParameter, match=name):
                SamplingParams(**{name: bound + beyond, **more})
    if kind.gt is not None:
        with pytest.raises(InvalidParameter, match=name):
            SamplingParams(**{name: kind.gt, **more})


def test_another_bound_of_the_type_is_another_one_everywhere() -> None:
    assert bounds_of(_Other)["top_k"] == {"description": "Another meaning.", "minimum": 3, "maximum": 5}
    wanted = {"description": "Another one.", "exclusiveMinimum": 0.25, "maximum": 0.5}
    assert bounds_of(_Other)["repetition_penalty"] == wanted
    options = {one.name: one for one in describe(flags_of(_Other))}
    assert limit(options["top_k"]) == "an integer between 3 and 5" and options["top_k"].default == 4
    assert options["top_k"].meaning == "Another meaning."
    with pytest.raises(ValueError, match="'2' is not allowed: it must be an integer between 3 and 5"):
        options["top_k"].read("2")


def _stated(tree: ast.AST) -> Counter[str]:
    """Sampling parameter → number of times that bounds are written beside its name, in a type or a JSON schema."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            calls = [each for each in ast.walk(node.annotation) if isinstance(each, ast.Call)]
            words = {word.arg for call in calls for word in call.keywords}
            found[node.target.id] += bool(words & {"ge", "gt", "le", "lt", "max_length", "min_length"})
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Dict):
                    inner = {each.value for each in value.keys if isinstance(each, ast.Constant)}
                    found[str(key.value)] += bool(inner & {"minimum", "exclusiveMinimum", "maximum", "maxItems"})
    return Counter({name: n for name, n in found.items() if n and name in SamplingParams.__struct_fields__})


OTHERS = {"engine.py": ["seed"], "options.py": ["seed", "seed"], "beams.py": ["max_tokens"]}
"""File → options named as a parameter that are something else: seeds of the engine, of a load, of inputs; a search."""


def test_bounds_are_written_once() -> None:
    """Those that stand in an alias (`Penalty`, ...) are not seen here, and seen to be equal above."""
    package = pathlib.Path(quire.__file__).parent
    found = {
        str(path.relative_to(package)): stated
        for path in package.rglob("*.py")
        if (stated := _stated(ast.parse(path.read_text())) - Counter(OTHERS.get(path.name, ())))
    }
    assert list(found) == ["core/sampling.py"]
    assert set(found["core/sampling.py"].values()) == {1} and "min_p" in found["core/sampling.py"]


@pytest.mark.parametrize(
    "source",
    ["class A:\n min_p: Annotated[float, Meta(ge=0, le=1)] = 0", 'B = {"min_p": {"minimum": 0}}'],
)
def test_bounds_that_are_written_again_are_found(source: str) -> None:
    assert _stated(ast.parse(source)) == {"min_p": 1}


def test_every_parameter_says_what_it_means() -> None:
    assert bounds_of(SamplingParams).keys() == set(SamplingParams.__struct_fields__)
    for name, schema in bounds_of(SamplingParams).items():
        assert schema["description"].endswith("."), name


def test_every_parameter_is_a_flag_or_named_as_none() -> None:
    assert set(SamplingFlags.__struct_fields__) | NO_FLAGS == set(SamplingParams.__struct_fields__)
    assert not set(SamplingFlags.__struct_fields__) & NO_FLAGS
    assert issubclass(SamplingFlags, msgspec.Struct)
