"""Arguments as bare text under a grammar: whatever it lets through is read as a value that fits the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import Phase, given, settings
from reading import matcher_behind
from small_tokenizers import byte_level
from tokenizers import AddedToken

from quire.core.errors import RequestError
from quire.core.structured import StructuredOutputsParams
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.matcher import Matcher
from quire.text.message import MessageReader
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_formats import marks_of, reader_of
from quire.text.tool_grammar import OfferedTool, call_grammar
from quire.text.xml_calls import XML_FORMATS
from quire.text.xml_grammar import VALUES
from quire.text.xml_values import TEXT_ONLY, types_of

STYLES = sorted(XML_FORMATS)
HEADS = {
    "glm45": "<tool_call>f\n",
    "qwen3_coder": "<tool_call>\n<function=f>\n",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n',
}
TAILS = {
    "glm45": "</tool_call>",
    "qwen3_coder": "</function>\n</tool_call>",
    "minimax_m2": "</invoke>\n</minimax:tool_call>",
}
TOKENIZER = HfTokenizer(byte_level(), {"type": "ByteLevel"}, {"eos_token": "</s>"})
"""Of single bytes, so that a text is written in one way."""
END = TOKENIZER.eos_id or 0
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER), [END])
MAX_TEXTS, MAX_STEPS, MAX_TOKENS = 12, 600, 300
PLAIN = [
    "a", "a\nb", "b", "True", "true", "null", "None", "5", "", "\n", "\nx\n", " x ", '"', '"a"', "\\", "é", "</param",
]  # fmt: skip
TAGGED = [
    "</parameter>", "</arg_value>", "a</parameter>\n</function>", "</parameter></invoke>", "</arg_value></tool_call>",
    "</parameter>\n<parameter=a>\n", "</arg_value>\n<arg_key>b</arg_key><arg_value>",
]  # fmt: skip
OTHERS = [True, False, None, 0, 1, 5, -2, 1.0, 1.5, 0.0, 1e22, 1e-7, [], [1.0, "a"], {}, {"a": True, "b": None}]
NESTED = [["</parameter></function>"], {"a": "</arg_value></tool_call>"}]
TEXT, LIST, OBJECT = 'two\nlines "é" \\' * 400, [*range(1500)], {"k": ["x" * 5000]}
"""Longer than what a reader holds back before it looks at it."""
VALUES_OF = [*PLAIN, *TAGGED, *OTHERS, *NESTED, TEXT, LIST]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object"]
TYPE = st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)
VALUE = st.sampled_from(VALUES_OF)
CASE = st.fixed_dictionaries(
    {}, optional={"type": TYPE, "enum": st.lists(VALUE, max_size=3), "deprecated": st.just(True)}
)
KEYWORDS = st.fixed_dictionaries({}, optional={"type": TYPE, "enum": st.lists(VALUE, max_size=5), "const": VALUE})
CASES = st.lists(CASE, min_size=1, max_size=3).map(lambda cases: {"anyOf": cases}) | CASE.map(
    lambda one: {"allOf": [one]}
)


@st.composite
def function(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters with one argument `a`, whose keywords stand in place, or in part behind a reference."""
    schema: dict[str, Any] = draw(KEYWORDS | KEYWORDS.filter(lambda one: "enum" in one or "const" in one) | CASES)
    if draw(st.booleans()):
        moved = {name: schema.pop(name) for name in list(schema) if draw(st.booleans())}
        schema = {"$ref": "#/$defs/x", "$defs": {"x": moved}, **schema}
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": schema}}
    if "$defs" in schema:
        parameters["$defs"] = schema.pop("$defs")
    return parameters if draw(st.booleans()) else parameters | {"required": ["a"]}


def compiled(style: str, parameters: dict[str, Any], *, strict: bool = True) -> StructuredOutputsParams:
    """RequestError where the request would be refused."""
    grammar = call_grammar(style, [OfferedTool("f", parameters, strict)], TOKENIZER, at_most_one=True)
    params = StructuredOutputsParams(calls=grammar)
    COMPILER.compile(grammar_of(params))
    return params


def is_end(matcher: Matcher) -> bool:
    return bool(matcher.mask()[END // 8] >> END % 8 & 1)


def is_let_through(text: str, params: StructuredOutputsParams) -> bool:
    """Without a mask for each token, which takes long."""
    params.verify()
    matcher = COMPILER.compile(grammar_of(params))
    return all(map(matcher.accept, TOKENIZER.encode(text, add_special_tokens=False))) and is_end(matcher)


def texts_of(params: StructuredOutputsParams, head: str, chance: random.Random) -> tuple[list[str], bool]:
    """(texts that the grammar allows behind a head, in any order; whether these are all)."""
    first = matcher_behind(COMPILER, TOKENIZER, head, params)
    assert first is not None
    found, todo, n_steps, are_all = [], [(first, list[int]())], 0, True
    while todo and len(found) < MAX_TEXTS and n_steps < MAX_STEPS:
        n_steps += 1
        matcher, tokens = todo.pop()
        if is_end(matcher):
            found.append(b"".join(TOKENIZER.token_bytes(token) for token in tokens).decode())
        mask = matcher.mask()
        nexts = [token for token in range(len(TOKENIZER)) if token != END and mask[token // 8] >> token % 8 & 1]
        chance.shuffle(nexts)
        are_all &= not nexts or len(tokens) < MAX_TOKENS
        for token in nexts if len(tokens) < MAX_TOKENS else []:
            other = matcher.copy()
            assert other.accept(token)
            todo.append((other, [*tokens, token]))
    return found, are_all and not todo


def read(style: str, parameters: dict[str, Any], text: str) -> dict[str, Any]:
    """The arguments of the one call in a text."""
    message = MessageReader(None, reader_of(style, {"f": parameters})).whole(text)
    assert len(message.calls) == 1 and not message.content, text
    arguments: dict[str, Any] = json.loads(message.calls[0].arguments)
    return arguments


def ways_of_writing(style: str, parameters: dict[str, Any]) -> set[str]:
    """All values as a model might write them. But for enumerated ones no grammar can keep JSON from quoting the tags
    that end it."""
    ways = {
        way
        for one in VALUES_OF
        for way in (str(one), json.dumps(one), json.dumps(one, ensure_ascii=False), f"\n{one}\n")
    }
    enumerates = ("enum" in str(parameters) or "const" in str(parameters)) and "anyOf" not in str(parameters)
    may_quote = enumerates or types_of(parameters, "a") == TEXT_ONLY
    return ways if may_quote else {way for way in ways if XML_FORMATS[style].end not in way}


def fits(value: dict[str, Any], parameters: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(parameters).is_valid(value))


@settings(max_examples=80, phases=(Phase.explicit, Phase.reuse, Phase.generate))  # to shrink takes minutes
@given(parameters=function(), style=st.sampled_from(STYLES), seed=st.integers(0, 1 << 30))
def test_what_is_let_through_fits_and_what_fits_is_let_through(
    parameters: dict[str, Any], style: str, seed: int
) -> None:
    """But for values that quote the tags around them."""
    good = [{"a": value} for value in VALUES_OF if fits({"a": value}, parameters)]
    safe = [one for one in good if not any(tag in json.dumps(one) for tag in ("</parameter>", "</arg_value>"))]
    try:
        params = compiled(style, parameters)
    except RequestError as error:
        if types_of(parameters, "a") == TEXT_ONLY and "anyOf" in str(parameters) and "bounded" in error.message:
            return
        assert "required" in parameters and not safe, error
        assert "no value fits the schema of the argument 'a'" in error.message
        return
    texts, are_all = texts_of(params, HEADS[style], random.Random(seed))
    found = [read(style, parameters, HEADS[style] + text) for text in texts]
    assert all(fits(one, parameters) for one in found), texts
    if are_all:
        for one in safe:
            assert one in found, one
    for written in ways_of_writing(style, parameters):
        before, between, end = VALUES[style]
        text = f"{HEADS[style]}{before}a{between}{written}{end}\n{TAILS[style]}"
        if is_let_through(text, params):
            assert fits(read(style, parameters, text), parameters), text


def one_argument(schema: Any, *, required: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"] if required else [], **more}


def allows(style: str, params: StructuredOutputsParams, value: str | None) -> bool:
    """Whether a call may have this text as its only argument; None: no argument."""
    before, between, end = VALUES[style]
    argument = "" if value is None else f"{before}a{between}{value}{end}\n"
    matcher = matcher_behind(COMPILER, TOKENIZER, HEADS[style] + argument + TAILS[style], params)
    return matcher is not None and is_end(matcher)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "enum": [True]}, {"type": "string", "enum": []}, {"enum": []}, {"const": 1, "enum": ["1"]},
        {"type": "integer", "enum": ["5", 1.5, True]}, {"type": "boolean", "const": 1}, False,
        {"type": "string", "$ref": "#/$defs/number"}, {"$ref": "#/$defs/number", "enum": ["5"]},
    ],
)  # fmt: skip
def test_an_argument_that_no_value_fits_is_refused_or_left_out(style: str, schema: Any, strict: bool) -> None:
    defs = {"number": {"type": "number"}}
    with pytest.raises(RequestError, match="no value fits the schema of the argument 'a'"):
        compiled(style, one_argument(schema, **{"$defs": defs}), strict=strict)
    params = compiled(style, one_argument(schema, required=False, **{"$defs": defs}), strict=strict)
    assert allows(style, params, None)
    assert not any(allows(style, params, value) for value in ("True", "true", "1", "5", '"5"', "", "x"))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "enum": ["a", True]}, {"a": "a"}, ["True", "true", '"a"']),
        ({"enum": ["C", "F", None]}, {"C": "C", "F": "F", "null": None}, ["K", '"C"', "None"]),
        ({"enum": ["a", "a\nb", "a\n", "a</"]}, {"a": "a", "a\nb": "a\nb", "a</": "a</"}, ["a\n\nb"]),
        ({"enum": ["a", "a</parameter>\n</invoke>", "a</arg_value></tool_call>"]}, {"a": "a"}, ["b"]),
        ({"enum": ["null", None]}, {'"null"': "null", "null": None}, ["none"]),
        ({"enum": ["5", 5, True]}, {'"5"': "5", "5": 5, "true": True}, ["True", "6"]),
        ({"type": ["string", "integer"], "enum": ["x", 2, None]}, {"x": "x", "2": 2}, ["null"]),
        ({"type": "integer", "enum": [1.0, 1e22]}, {"1.0": 1, "1e+22": 1e22}, ["9223372036854775807"]),
        ({"type": "integer", "enum": [1, 5, 9], "minimum": 4}, {"5": 5, "9": 9}, ["1"]),
        ({"enum": [[1], {"k": "v"}]}, {"[1]": [1], '{ "k": "v"}': {"k": "v"}}, ["[2]"]),
        ({"$ref": "#/$defs/abc", "enum": ["b", "c", "d"]}, {"b": "b", "c": "c"}, ["a", "d"]),
        ({"$ref": "#/$defs/number", "maximum": 3}, {"3": 3}, ["4", "x"]),
        ({"$ref": "#/$defs/abc", "description": "one"}, {"a": "a"}, ["d"]),
        (
            {"anyOf": [{"type": "string", "enum": ["a", "null"]}, {"type": "null"}]},
            {"a": "a", '"null"': "null", "null": None},
            ['"a"', "None", "b"],
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/abc"}, {"type": ["null"]}], "default": None},
            {"a": "a", "null": None},
            ['"a"', "d"],
        ),
        (
            {"anyOf": [{"$ref": "#/$defs/abc"}, {"const": 5}, {"enum": ["a", "5"]}]},
            {"a": "a", "5": 5, '"5"': "5"},
            ['"a"', "null"],
        ),
        ({"allOf": [{"$ref": "#/$defs/abc"}], "default": "a", "deprecated": True}, {"a": "a"}, ['"a"', "d"]),
        (
            {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", "c", "b"]}, {"$ref": "#/$defs/only_c"}]},
            {"a": "a", "b": "b"},
            ['"a"', "c"],
        ),
        (
            {"anyOf": [{"type": "string", "const": 1}, {"type": "null", "enum": ["a"]}, {"const": "b"}]},
            {"b": "b"},
            ["1", "a", "null"],
        ),
        ({"type": "string", "anyOf": [{"enum": ["a", 5]}, {"type": "null"}]}, {"a": "a"}, ["5", "null"]),
        (
            {"enum": ["a", "z", None], "anyOf": [{"$ref": "#/$defs/abc"}, {"type": "null"}]},
            {"a": "a", "null": None},
            ["b", "z"],
        ),
        ({"anyOf": [{"enum": ["a", [1]]}, {"type": "null"}]}, {'"a"': "a", "[1]": [1], "null": None}, ["a", "[2]"]),
        ({"anyOf": [{"$ref": "#/$defs/abc"}, {"type": "integer"}]}, {'"a"': "a", "5": 5}, ["a", '"d"']),
    ],
)
def test_enumerations(style: str, schema: Any, good: dict[str, Any], bad: list[str]) -> None:
    defs = {"abc": {"type": "string", "enum": ["a", "b", "c"]}, "only_c": {"allOf": [{"enum": ["c"]}]},
            "number": {"type": "number"}}  # fmt: skip
    parameters = one_argument(schema, **{"$defs": defs})
    params = compiled(style, parameters)
    before, between, end = VALUES[style]
    for written, value in good.items():
        assert allows(style, params, written), written
        text = f"{HEADS[style]}{before}a{between}{written}{end}\n{TAILS[style]}"
        assert read(style, parameters, text) == {"a": value}
    assert not any(allows(style, params, written) for written in bad)


@pytest.mark.parametrize("style", STYLES)
def test_what_is_no_enumeration_or_would_be_passed_over_is_refused(style: str) -> None:
    for values in ("a", {"a": 1}, None):
        with pytest.raises(RequestError, match="and no list"):
            compiled(style, one_argument({"type": "string", "enum": values}), strict=values is None)
    for schema in ({"type": "string", "enum": None}, {"anyOf": [{"type": "string", "enum": None}, {"type": "null"}]}):
        for required in (True, False):
            free = compiled(style, one_argument(schema, required=required), strict=False)
            assert allows(style, free, "whatever")
    for key in ("allOf", "not", "if", "pattern"):
        with pytest.raises(RequestError, match="'a' as bare text, which cannot be bounded"):
            compiled(style, one_argument({"type": "string", key: {}}))
        compiled(style, one_argument({"type": "string", key: {}}), strict=False)
    with pytest.raises(RequestError, match="'additionalProperties' cannot be enforced"):
        compiled(style, {"type": "object", "additionalProperties": {"type": "integer"}})
    compiled(style, {"type": "object", "additionalProperties": True})


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "is_free"),
    [
        ({"type": ["string", "null"]}, True),
        ({"anyOf": [{"type": "string", "title": "Name"}, {"type": "null"}], "default": None}, True),
        ({"$ref": "#/$defs/name", "description": "of whom"}, True),
        ({"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "not": {"const": "x"}}, False),
        ({"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]}, True),
        ({"anyOf": [{"$ref": "#/$defs/long"}, {"type": "null"}]}, False),
        ({"anyOf": [{"$ref": "#/$defs/long", "type": "string"}, {"type": "null"}]}, False),
        (
            {"type": ["string", "null"], "deprecated": True, "readOnly": True, "writeOnly": False, "nullable": True},
            True,
        ),
        ({"anyOf": [{"type": "string", "deprecated": True, "$schema": "x"}, {"type": "null"}], "nullable": True}, True),
        ({"allOf": [{"$ref": "#/$defs/name"}], "title": "Name"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "type": "string"}, None),
        ({"type": ["string", "array"]}, False),
        ({}, False),
    ],
)
def test_a_text_beside_null_is_written_bare(style: str, schema: Any, is_free: bool | None) -> None:
    parameters = one_argument(
        schema, **{"$defs": {"name": {"type": ["string", "null"]}, "long": {"type": "string", "minLength": 1}}}
    )
    if is_free is None or "not" in schema:
        with pytest.raises(RequestError):
            compiled(style, parameters)
        return
    params = compiled(style, parameters)
    assert allows(style, params, '"Bob"') and allows(style, params, "Bob") is is_free
    before, between, end = VALUES[style]
    for written, value in (("Bob", "Bob"), ("null", None), ('"null"', "null"), ("5", "5"), ("x" * 5000, "x" * 5000),
                           ('"x' * 4000, '"x' * 4000)):  # fmt: skip
        if is_free:
            assert allows(style, params, written)
            text = f"{HEADS[style]}{before}a{between}{written}{end}\n{TAILS[style]}"
            assert read(style, parameters, text) == {"a": value}


ENDS = {"maxLength": 9000}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": ["string", "array"]}, TEXT), ({"type": ["string", "array"]}, LIST), ({}, TEXT),
        ({}, OBJECT), ({"type": ["string", "null"], **ENDS}, TEXT),
        ({"type": ["string", "null"], "x-own": 1}, TEXT),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, TEXT),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string", "maxLength": 10}]}, LIST),
        ({"anyOf": [{"type": "object"}, {"type": "string", "enum": ["auto"]}]}, OBJECT),
        ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 10}]}, 10**4200),
        ({"type": ["string", "array"]}, "x" * 70_000),
    ],
)  # fmt: skip
def test_long_values_that_are_written_as_json_are_read_as_such(style: str, schema: Any, value: Any) -> None:
    parameters = one_argument(schema, **{"$defs": {"text": {"type": "string", **ENDS}}})
    params, (before, between, end) = compiled(style, parameters), VALUES[style]
    text = f"{HEADS[style]}{before}a{between}{json.dumps(value, ensure_ascii=False)}{end}\n{TAILS[style]}"
    assert is_let_through(text, params) and read(style, parameters, text) == {"a": value}


@pytest.mark.parametrize("style", STYLES)
def test_free_text_ends_where_the_reader_ends_it(style: str) -> None:
    """Also without the line end that the models write before the tag."""
    parameters, form = one_argument({"type": "string"}), XML_FORMATS[style]
    params = compiled(style, parameters)
    before, between, _ = VALUES[style]
    text = f"{HEADS[style]}{before}a{between}x{form.end}\n{TAILS[style]}"
    matcher = matcher_behind(COMPILER, TOKENIZER, text, params)
    assert matcher is not None and is_end(matcher) and read(style, parameters, text) == {"a": "x"}
    for quoted in (form.closes[0], f"{form.key}a", "", "\n"):
        assert allows(style, params, quoted), quoted
    assert not allows(style, params, f"x{form.end}{form.closes[0]}") and not allows(style, params, f"x{form.end} x")


@pytest.mark.parametrize("style", STYLES)
def test_enumerations_before_a_tag_that_is_a_control_token(style: str) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks_of(style)])
    own = HfTokenizer(backend, {"type": "ByteLevel"}, {"eos_token": "</s>"})
    compiler, end_id = GrammarCompiler(own, len(own), [own.eos_id or 0]), own.eos_id or 0
    parameters = one_argument({"enum": ["", "a", "a\nb", "5", 5, None]})
    grammar = call_grammar(style, [OfferedTool("f", parameters, True)], own, at_most_one=True)
    before, between, end = VALUES[style]
    for written, value in (("", ""), ("a", "a"), ("a\nb", "a\nb"), ('"5"', "5"), ("5", 5), ("null", None), ("b", ...)):
        text = f"{HEADS[style]}{before}a{between}{written}{end}\n{TAILS[style]}"
        matcher = matcher_behind(compiler, own, text, StructuredOutputsParams(calls=grammar))
        assert (matcher is not None and bool(matcher.mask()[end_id // 8] >> end_id % 8 & 1)) is (value is not ...)
        assert value is ... or read(style, parameters, text) == {"a": value}
