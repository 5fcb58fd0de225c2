"""SamplingParams: what is normalised, and that nothing but InvalidParameter comes out of `verify`."""

from __future__ import annotations

import contextlib
import fractions
import math
import re
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import InvalidParameter, shown
from quire.core.field_checks import FieldChecks
from quire.core.sampling import OutputKind, SamplingParams
from quire.core.structured import StructuredOutputsParams

WIDTH = 100


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


def test_a_plain_string_is_one_stop_string() -> None:
    params = SamplingParams(stop="import", bad_words="def")  # type: ignore[arg-type]
    assert (params.stop, params.bad_words) == (["import"], ["def"])
    params.verify(WIDTH)


def test_none_is_an_empty_list_and_a_tuple_a_list() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert SamplingParams(stop=("a", "b"), stop_token_ids=(1,)).stop == ["a", "b"]  # type: ignore[arg-type]
    params.verify(WIDTH)


def test_numbers_of_numpy_become_plain() -> None:
    params = SamplingParams(
        temperature=np.float64(0.5),
        seed=np.int64(3),
        logit_bias={np.int32(4): np.float64(1.0)},  # type: ignore[dict-item]
    )
    params.verify(WIDTH)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_keys_of_logit_bias_may_be_text() -> None:
    """As they are in JSON, and in what was written for the OpenAI client."""
    params = SamplingParams(logit_bias={"4": 1.0, "0": -2})
    params.verify(WIDTH)
    assert params.logit_bias == {4: 1.0, 0: -2}
    for key in ("-1", "x", "", "٣", "9" * 5000, "1.0"):
        with pytest.raises(InvalidParameter, match="logit_bias"):
            SamplingParams(logit_bias={key: 1.0}).verify(WIDTH)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [5]),
        ("stop", {"a": 1}),
        ("stop", ["\ud800"]),
        ("bad_words", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 7),
        ("logit_bias", {5: "x"}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", [(5, 1.0)]),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_k", 1.5),
        ("logprobs", True),
        ("logprobs", "3"),
        ("ignore_eos", "yes"),
        ("output_kind", "delta"),
        ("seed", 10**5000),
        ("n", _Unprintable()),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_a_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value}).verify(WIDTH)
    assert caught.value.param == name


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, 2**63, 0, 1, 99, 100]),
    st.builds(pow, st.just(-10), st.just(5001)),  # Hypothesis could not name the number itself
    st.floats(),
    st.text(st.characters(), max_size=4),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.sampled_from([np.float32(1), np.float64("inf"), np.int64(2), np.bool_(True), np.array([1, 2]), np.zeros(())]),
    st.sampled_from([_Unprintable(), object(), int, fractions.Fraction(1, 2), range(3), OutputKind.DELTA]),
)
VALUES = st.one_of(
    ATOMS,
    st.lists(ATOMS, max_size=3),
    st.tuples(ATOMS),
    st.lists(st.lists(ATOMS, max_size=2), max_size=2),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2), st.none()), ATOMS, max_size=3),
)
NAMES = st.sampled_from([field.name for field in msgspec.structs.fields(SamplingParams)])


@settings(max_examples=1500)
@given(st.dictionaries(NAMES, VALUES, max_size=3), NAMES, VALUES)
def test_what_passes_can_cross_to_the_engine_and_the_rest_is_invalid_parameter(
    fields: dict[str, Any], later: str, value: Any
) -> None:
    params = SamplingParams()
    with contextlib.suppress(InvalidParameter):
        params = SamplingParams(**fields)
        params.verify(WIDTH)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    setattr(params, later, value)
    with contextlib.suppress(InvalidParameter):
        params.verify(WIDTH)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -1, "a number in [0, 100]"),
        ("top_p", 0, "a number in (0, 1]"),
        ("top_p", 0.0, "a number in (0, 1]"),
        ("min_p", float("nan"), "a number in [0, 1]"),
        ("repetition_penalty", 0.0001, "a number in [0.001, 10]"),
        ("n", 129, "an integer between 1 and 128"),
        ("n", None, "an integer between 1 and 128"),
        ("top_k", -2, "an integer between -1 and 2147483647"),
        ("seed", -(2**63) - 1, "a 64-bit signed integer"),
        ("seed", 2**63, "a 64-bit signed integer"),
        ("max_tokens", 0, "an integer between 1 and 2147483647"),
        ("logprobs", -1, "an integer of at least 0"),
        ("thinking_token_budget", -1, "an integer between 0 and 2147483647"),
        ("ignore_eos", "yes", "True or False"),
        ("min_tokens", 17, "at most max_tokens = 16"),
    ],
)
def test_a_value_is_judged_when_it_is_given_and_again_when_it_was_set(name: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidParameter) as made:
        SamplingParams(**{name: value})
    assert made.value.param == name
    assert made.value.message == f"{name} = {shown(value)} is not allowed: it must be {limit}."
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(InvalidParameter) as verified:
        params.verify(WIDTH)
    assert verified.value.message == made.value.message
    with pytest.raises(InvalidParameter):
        msgspec.structs.replace(SamplingParams(), **{name: value})


def test_what_depends_on_the_model_is_left_to_verify() -> None:
    params = SamplingParams(stop_token_ids=[WIDTH - 1], logprobs=3)
    params.verify(WIDTH, max_logprobs=3)
    with pytest.raises(InvalidParameter, match=r"logprobs = 3 .* between 0 and 2. Raise --max-logprobs"):
        params.verify(WIDTH, max_logprobs=2)
    for name, value in (("stop_token_ids", [1, WIDTH]), ("allowed_token_ids", [WIDTH]), ("logit_bias", {WIDTH: 1.0})):
        with pytest.raises(InvalidParameter, match=f"{name} = {WIDTH} .* token ids between 0 and {WIDTH - 1}"):
            SamplingParams(**{name: value}).verify(WIDTH)


def test_a_misspelt_argument_is_named_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"SamplingParams has no argument 'temprature'; did you mean temperature\?"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"SamplingParams has no argument 'colour'; known are allowed_token_ids, .* temperature, "
    ):
        SamplingParams(colour=0)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"SamplingParams\(flat_logprobs=...\) is known in vLLM, not in Quire: leave it out"
    ):
        SamplingParams(flat_logprobs=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"StructuredOutputsParams has no argument 'jsn'; did you mean json\?"):
        StructuredOutputsParams(jsn={})  # type: ignore[call-arg]


_ONE_OF = "takes exactly one of json, regex, choice, grammar, json_object, structural_tag; it was given"


@pytest.mark.parametrize(("given", "said"), [
    ({}, f"structured_outputs {_ONE_OF} none of them."),
    ({"json": {}, "regex": "a"}, f"structured_outputs {_ONE_OF} json and regex."),
    ({"regex": "a\ud800"}, r"structured_outputs.regex = 'a\ud800' is not allowed: it must be valid Unicode text"),
    ({"regex": b"a"}, "structured_outputs.regex = b'a' is not allowed: it must be a text."),
    ({"choice": ["a", None]}, "structured_outputs.choice = ['a', None] is not allowed: it must be a list of texts."),
    ({"json_object": 3}, "structured_outputs.json_object = 3 is not allowed: it must be true or false."),
    ({"structural_tag": 3}, "structured_outputs.structural_tag = 3 is not allowed: it must be a text or an object"),
    ({"json": {"a": {1}}}, "structured_outputs.json = {1} is not allowed: it must be made of values that JSON has."),
    ({"json": {"a": math.nan}}, "structured_outputs.json = nan is not allowed: it must be made of values that JSON"),
    ({"json": [{1: 2}]}, "structured_outputs.json = {1: 2} is not allowed: it must be made of objects whose keys are"),
])  # fmt: skip
def test_a_wrong_constraint_is_told_without_our_types(given: dict[str, Any], said: str) -> None:
    """None of msgspec's words, and nothing that a process of grammars could die of."""
    with pytest.raises(InvalidParameter) as error:
        StructuredOutputsParams(**given).verify()
    assert error.value.message.startswith(said)


def test_bounds_on_the_wire_are_those_of_the_type() -> None:
    """A value that only the type's own check finds bad is refused as well."""
    for name, value in (("temperature", -1), ("stop", [""]), ("min_tokens", 99)):
        with pytest.raises((msgspec.ValidationError, InvalidParameter), match=name):
            msgspec.convert({name: value}, SamplingParams)


class _Narrow(SamplingParams):
    top_k: Annotated[int, msgspec.Meta(ge=3, le=5)] = 4
    min_p: Annotated[float, msgspec.Meta(gt=0.25, le=0.5)] = 0.5
    seed: Annotated[int, msgspec.Meta(ge=7, le=9)] | None = None


def test_checks_follow_the_bounds_of_the_type() -> None:
    checks = FieldChecks(_Narrow)
    for name, good, bad, limit in (
        ("top_k", [3, 5], [2, 6], "an integer between 3 and 5"),
        ("min_p", [0.26, 0.5], [0.25, 0.51], "a number in (0.25, 0.5]"),
        ("seed", [7, 9, None], [6, 10], "an integer between 7 and 9"),
    ):
        assert [checks.one(name, value) for value in good] == good
        for value in bad:
            with pytest.raises(
                InvalidParameter, match=re.escape(f"{name} = {value} is not allowed: it must be {limit}.")
            ):
                checks.one(name, value)


def test_shown_never_raises_and_is_short() -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    for value in (10**5000, [10**5000], _Unprintable(), [_Unprintable()], deep, "x" * 999, {"a": "b" * 999}):
        assert len(shown(value)) <= 200
    assert shown([1.5, "a"]) == "[1.5, 'a']"
