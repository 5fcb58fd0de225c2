"""Calls with arguments as bare text: JSON by the function's schema, whatever the cut, and quoted tags stay text."""

from __future__ import annotations

import json
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from reading import joined

from quire.text.message import MessageReader, WholeMessage
from quire.text.tool_formats import marks_of, reader_of
from quire.text.xml_calls import XML_FORMATS
from quire.text.xml_values import MAX_HELD, MAX_JSON, _begins_json, json_of, types_of

F: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]},
        "items": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "shape": {"$ref": "#/$defs/shape"},
        "unit": {"enum": ["C", "F"]},
        "any": {},
    },
    "$defs": {"shape": {"type": "object"}},
}
FUNCTIONS = {"f": F, "a.b-c": {}}


def glm(name: str, **values: str) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in values.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def qwen(name: str, **values: str) -> str:
    pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def minimax(name: str, **values: str) -> str:
    pairs = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in values.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>'


WRITE = {"glm45": glm, "qwen3_coder": qwen, "minimax_m2": minimax}
STYLES = sorted(XML_FORMATS)


def reader(style: str) -> MessageReader:
    return MessageReader(None, reader_of(style, FUNCTIONS))


def whole(style: str, text: str) -> WholeMessage:
    return reader(style).whole(text)


def streamed(style: str, chunks: list[str]) -> WholeMessage:
    return joined(reader(style), chunks)


def test_every_format_has_its_cases() -> None:
    assert set(WRITE) == set(XML_FORMATS)


MIXED = 'two\nlines "and" \\ é </function> <tool_call>'
VALUES = [
    ({"text": "Paris"}, {"text": "Paris"}),
    ({"text": "5", "n": "5"}, {"text": "5", "n": 5}),
    ({"n": "five"}, {"n": "five"}),
    ({"x": "1e3", "flag": "True"}, {"x": 1e3, "flag": True}),
    ({"flag": "no"}, {"flag": "no"}),
    ({"maybe": "null"}, {"maybe": None}),
    ({"maybe": "12"}, {"maybe": "12"}),
    ({"items": '["a", 1]', "shape": '{"k": [1]}'}, {"items": ["a", 1], "shape": {"k": [1]}}),
    ({"items": "[1,"}, {"items": "[1,"}),
    ({"unit": "C", "any": "7"}, {"unit": "C", "any": 7}),
    ({"any": "some words", "other": "[NaN]"}, {"any": "some words", "other": "[NaN]"}),
    ({"text": MIXED}, {"text": MIXED}),
    ({"text": ""}, {"text": ""}),
    ({"text": "\n\nx\n"}, {"text": "\n\nx\n"}),
    ({}, {}),
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("values", "expected"), VALUES)
def test_arguments_are_json_of_the_schema(style: str, values: dict[str, str], expected: dict[str, Any]) -> None:
    if style == "minimax_m2":  # whose tags stand directly at a value, and that is read with line ends around it too
        values = {key: f"\n{text}\n" if text.startswith("\n") else text for key, text in values.items()}
    text = "Sure.\n" + WRITE[style]("f", **values)
    message = whole(style, text)
    assert message.content == "Sure.\n"
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [("f", expected)]
    for at in range(len(text) + 1):
        assert streamed(style, [text[:at], text[at:]]) == message
    assert streamed(style, list(text)) == message


@pytest.mark.parametrize("style", STYLES)
def test_a_tag_may_be_quoted(style: str) -> None:
    """It closes nothing where no tag of the format follows."""
    said = f'write {XML_FORMATS[style].end} and then "go on"'
    message = whole(style, WRITE[style]("f", text=said, n="1"))
    assert json.loads(message.calls[0].arguments) == {"text": said, "n": 1}


@pytest.mark.parametrize("style", STYLES)
def test_several_calls_and_what_follows(style: str) -> None:
    twice = WRITE[style]("f", n="1") + "\n" + WRITE[style]("a.b-c", y="2")
    message = whole(style, twice + " Done.")
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [("f", {"n": 1}), ("a.b-c", {"y": 2})]
    assert message.content == " Done." and whole(style, twice).content is None


def test_a_series_behind_one_mark() -> None:
    one = '<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n'
    for text, content in (
        (f"<minimax:tool_call>\n{one}{one}</minimax:tool_call>", None),
        (f"<minimax:tool_call>{one}{one}</minimax:tool_", None),
        (f"<minimax:tool_call>{one}{one}Done.", "\nDone."),
        (f'<minimax:tool_call>{one}{one}<invoke name="nobody">', '\n<invoke name="nobody">'),
    ):
        message = streamed("minimax_m2", list(text))
        assert [json.loads(one.arguments) for one in message.calls] == [{"n": 1}] * 2
        assert message.content == content


@pytest.mark.parametrize("style", STYLES)
def test_what_is_no_call_stays_text(style: str) -> None:
    mark = XML_FORMATS[style].mark
    cut_head = WRITE[style]("f", n="1").partition("n")[0]
    for text in (mark, f"Calls begin with {mark} here.", WRITE[style]("nobody", n="1"), f"{mark}f and so on",
                 cut_head, f'{mark}{{"name": "f", "arguments": {{}}}}'):  # fmt: skip
        message = whole(style, text)
        assert message.content == text and not message.calls


@pytest.mark.parametrize("style", STYLES)
def test_a_call_that_is_cut_is_a_call(style: str) -> None:
    text = WRITE[style]("f", text="abc", n="12")
    end = text.index("abc") + 3
    assert whole(style, text[:end]).calls[0].arguments == '{"text": "abc'
    assert whole(style, text[: text.index("12") + 1]).calls[0].arguments == '{"text": "abc", "n": 1'
    ended = text.rindex(XML_FORMATS[style].closes[0]) + len(XML_FORMATS[style].closes[0])
    assert json.loads(whole(style, text[:ended]).calls[0].arguments) == {"text": "abc", "n": 12}
    open_call = text[: text.rindex(XML_FORMATS[style].end) + len(XML_FORMATS[style].end)]
    assert whole(style, open_call).calls[0].arguments == '{"text": "abc", "n": 12'


def test_a_missing_tag_of_two_is_forgiven() -> None:
    head = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n"
    for end, content in (("</tool_call>", None), ("</function>", None), ("</function>\nDone.", "\nDone.")):
        message = whole("qwen3_coder", head + end)
        assert json.loads(message.calls[0].arguments) == {"n": 1} and message.content == content


CALL = qwen("f", text="x", n="1")
BARE = CALL.removeprefix("<tool_call>\n")
OPEN = BARE.removesuffix("\n</tool_call>")
EMPTY = "<function=a.b-c>\n</function>"
F_ARGUMENTS = ("f", {"text": "x", "n": 1})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (BARE, None, [F_ARGUMENTS]),
        (OPEN, None, [F_ARGUMENTS]),
        (f"Let me look.\n\n{BARE}", "Let me look.\n\n", [F_ARGUMENTS]),
        (f"a <b> <fun {OPEN}\nDone.", "a <b> <fun \nDone.", [F_ARGUMENTS]),
        (f"{BARE}\n{BARE}", None, [F_ARGUMENTS] * 2),
        (f"{OPEN}\n{OPEN}{OPEN}", None, [F_ARGUMENTS] * 3),
        (f"{CALL}\n{BARE}\n{CALL}", None, [F_ARGUMENTS] * 3),
        (f"<tool_call>\n{OPEN}\n{BARE}", None, [F_ARGUMENTS] * 2),
        (f"<tool_call> Now {OPEN}", "<tool_call> Now ", [F_ARGUMENTS]),
        (f"<tool_call>\n{EMPTY}", None, [("a.b-c", {})]),
        (EMPTY, None, [("a.b-c", {})]),
        (f"{EMPTY}\n</tool_", None, [("a.b-c", {})]),
        (f"{EMPTY}\n<function=a.b-c></tool_call> So.", " So.", [("a.b-c", {})] * 2),
        (f"{EMPTY}\n</t", None, [("a.b-c", {})]),
        (f"{EMPTY}\n</", "\n</", [("a.b-c", {})]),
        (f"{EMPTY}\n<", "\n<", [("a.b-c", {})]),
        (f"{EMPTY}\n", None, [("a.b-c", {})]),
        (f"{OPEN}<", "<", [F_ARGUMENTS]),
        (f"<tool_call>\n{OPEN}\n<", None, [F_ARGUMENTS]),
        (f"<tool_call>\n{OPEN}\n{OPEN}\n<", "\n<", [F_ARGUMENTS] * 2),
        (f"<tool_call><{OPEN}\n<", "<tool_call><\n<", [F_ARGUMENTS]),
        (f"{EMPTY}\n<fun", "\n<fun", [("a.b-c", {})]),
        ("Qwen writes <function=f> and", "Qwen writes <function=f> and", []),
        ("`<function=f>` begins", "`<function=f>` begins", []),
        ("Write <function=", "Write <function=", []),
        (OPEN.replace("=f>", "=nobody>"), OPEN.replace("=f>", "=nobody>"), []),
        (OPEN.replace("=f>", "= f>"), OPEN.replace("=f>", "= f>"), []),
        (f"<function={OPEN}", "<function=", [F_ARGUMENTS]),
    ],
)
def test_the_mark_may_be_missing(text: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    message = whole("qwen3_coder", text)
    assert message.content == content
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == calls
    for at in range(len(text) + 1):
        assert streamed("qwen3_coder", [text[:at], text[at:]]) == message
    assert streamed("qwen3_coder", list(text)) == message


def test_a_call_without_the_mark_is_one_of_this_format_alone() -> None:
    for style in {*STYLES} - {"qwen3_coder"}:
        text = WRITE[style]("f", n="1").removeprefix(XML_FORMATS[style].mark)
        assert whole(style, text).content == text


@pytest.mark.parametrize("style", STYLES)
def test_text_is_held_back_only_where_a_call_may_begin(style: str) -> None:
    openers = XML_FORMATS[style].openers
    text = f"if a < b: <fun> <too> {openers[-1][:-1]} <<{openers[0][:-2]}x <function>\n<f"
    one, said, fed = reader(style), "", ""
    for char in text:
        fed += char
        said += "".join(piece.text for piece in one.feed(char))
        held = fed[len(said) :]
        assert said + held == fed and (not held or any(opener.startswith(held) for opener in openers))
    assert said + "".join(piece.text for piece in one.finish()) == text


TRICKY = [
    *(write("f", text="x", n="1") for write in WRITE.values()), *(tag for style in STYLES for tag in marks_of(style)),
    BARE, OPEN, EMPTY, "<function=", "<function=f>", "<parameter=n>", '<invoke name="f">', '<parameter name="text">',
    "<arg_key>n</arg_key>", "f\n", "<", "</", "</para", "\n", " ", "word", "é", '"', "\\", "5", "{",
]  # fmt: skip


@settings(max_examples=600)
@given(
    parts=st.lists(st.sampled_from(TRICKY), max_size=12),
    places=st.lists(st.integers(0, 400), max_size=8),
    style=st.sampled_from(STYLES),
)
def test_any_cut_gives_the_same_message(parts: list[str], places: list[int], style: str) -> None:
    text = "".join(parts)
    cut = sorted(min(place, len(text)) for place in places)
    message = whole(style, text)
    assert streamed(style, [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]) == message
    assert streamed(style, list(text)) == message
    if not message.calls:
        assert (message.content or "") == text
    said = (message.content or "") + "".join(one.arguments for one in message.calls)
    assert said.count("word") == text.count("word") and said.count("é") == text.count("é")


@pytest.mark.parametrize("style", STYLES)
def test_long_texts_are_streamed_and_others_bounded(style: str) -> None:
    style_, value = XML_FORMATS[style], WRITE[style]("f", text="@").partition("@")[0]
    one = reader(style)
    one.feed(value)
    assert sum(len(piece.text) for _ in range(1000) for piece in one.feed("x" * 1000)) >= 999_999
    for key, text, first in (("items", "[" + "1," * MAX_HELD, "["), ("items", "word " * MAX_HELD, '"'),
                             ("any", "[" * 2 * MAX_HELD, '"'), ("any", " " * 2 * MAX_HELD + "{", '"')):  # fmt: skip
        head = value.replace("text", key)
        message = streamed(style, [head, *[text[at : at + 37] for at in range(0, len(text), 37)], style_.end])
        assert message.calls[0].arguments.removeprefix(f'{{"{key}": ').startswith(first)
        assert message == whole(style, head + text + style_.end)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("at_value", [False, True])
def test_very_many_marks_take_linear_time(style: str, at_value: bool) -> None:
    form = XML_FORMATS[style]
    heads = [f"{opener}f{form.named}" for opener in form.openers]
    for unit in ("<", *marks_of(style), f"{form.mark}f", *heads, f"{form.end}\n", " "):
        text = (WRITE[style]("f", text="@").partition("@")[0] if at_value else "") + unit * (100_000 // len(unit))
        one, started_s = reader(style), time.process_time()
        for at in range(0, len(text), 37):
            one.feed(text[at : at + 37])
        one.finish()
        assert time.process_time() - started_s < 4


def test_long_and_large_numbers_are_numbers() -> None:
    """Which a grammar does not keep a model from writing. What only looks like one is a text."""
    for text, key, is_number in (("1e400", "x", True), ("-1e400", "n", True), ("1" * 5000, "n", True),
                                 ("[1, -1e400]", "items", True), ("[1e400, NaN]", "items", False),
                                 ("5 apples" * 1000, "n", False), ("1" * 5000, "any", True), ("-" * 5000, "n", False),
                                 ("0.0." * 1500, "x", False), ("1-2-" * 1500, "n", False), ("0" * 5000, "n", False),
                                 ("1" * 5000 + ".", "x", False), ("1" * 5000 + "e", "n", False),
                                 ("1" * 5000 + "-", "any", False), ("1" * 4096 + ".5e-7", "x", True),
                                 ("-0." + "1" * 5000 + "E+3", "x", True), ("1" * (MAX_JSON + 9), "x", True),
                                 ("[" + "1" * 4095 + "e-1]", "items", True), ("[" + "1" * 4095 + "e--", "items", True),
                                 ("[" + "1-" * 4096, "items", False)):  # fmt: skip
        for style in STYLES:
            arguments = whole(style, WRITE[style]("f", **{key: text})).calls[0].arguments
            assert arguments == (f'{{"{key}": {text}}}' if is_number else f'{{"{key}": "{text}"}}')
            assert text.endswith("--") or json.loads(arguments, parse_int=str).keys() == {key}


UNION = {"type": "object", "properties": {"a": {"type": ["string", "array", "object", "null"]}}}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        (json.dumps("two\nlines é" * 500), True), (json.dumps("\\u" * 2048), True), (json.dumps(["x"] * 2000), True),
        (json.dumps({"k": ["\n", 1.5, None]} | {str(n): True for n in range(900)}, indent=2), True),
        ("[" + "1.25e-3," * 2000 + "0]\n ", True), ("[1e400" + ", -1E999" * 1000 + "]", True),
        ('"' + "x" * 5000, False), ('"x" + ' * 1000, False), ('["x"], ' * 1000, False), ('["x", ' * 1000, False),
        ("{x" * 5000, False), ("[" + "1," * 5000 + "x]", False), ('{"a": 1} ' * 1000, False),
        ('"' + "x" * MAX_JSON + '"', True), ("[" + "1, " * MAX_JSON + "2]", True), ('"a"' * MAX_JSON, False),
        ("[x" * MAX_JSON, False), (" " * 5000 + "[]", False),
    ],
)  # fmt: skip
def test_long_json_beside_a_text_is_json(style: str, text: str, is_json: bool) -> None:
    """As a grammar makes models write it. What does not go on as JSON stays the text that it is."""
    call = WRITE[style]("f", a=text)
    one = MessageReader(None, reader_of(style, {"f": UNION})).whole(call)
    assert json.loads(one.calls[0].arguments)["a"] == (json.loads(text) if is_json else text)
    assert one == joined(
        MessageReader(None, reader_of(style, {"f": UNION})), [call[at : at + 37] for at in range(0, len(call), 37)]
    )


def test_what_begins_as_json_is_known() -> None:
    """Whatever is cut off."""
    text = '{"a\\n\\u00e9": [1, -2.5e-3, 1e400, 0, true, false, null], "": {"b": [], "c": "é"}} '
    for end in range(len(text) + 1):
        assert _begins_json(text[:end]), text[:end]
    for bad in ("[01", "[1.5.", "[1,,", "[,", "{1", '{"a",', "[1]]", '"a"b', "tru1", "[-a", "1.e", "--", '"\\x', '"\n'):
        assert not _begins_json(bad), bad


def test_types() -> None:
    assert types_of(F, "shape") == {"object"} and types_of(F, "items") == {"array", "null"}
    assert types_of(F, "any") is None and types_of(F, "missing") is None and types_of({"properties": 5}, "x") is None
    loop = {"properties": {"a": {"$ref": "#/properties/a"}}}
    assert types_of(loop, "a") is None
    deep = {a: {"anyOf": [{"$ref": f"#/properties/{b}"}] * 100} for a, b in zip("abcd", "bcde", strict=True)}
    begin_s = time.process_time()
    assert types_of({"properties": deep | {"e": {"type": "string"}}}, "a") == {"string"}
    assert time.process_time() - begin_s < 1
    mixed = frozenset({"string", "integer"})
    for cases, found in (([{"$ref": "#/properties/s"}], {"string"}), ([{}], None), ([{"type": "null"}] * 2, None)):
        assert types_of({"properties": {"a": {"allOf": cases}, "s": {"type": "string"}}}, "a") == found
    assert [json_of(text, mixed) for text in ("1", "1.0", "1.5", "x")] == ["1", "1.0", '"1.5"', '"x"']
    assert json_of("1.5", frozenset({"integer"})) == "1.5"
    assert json_of("[" * 100_000, None).startswith('"') and json_of("null", frozenset({"string"})) == '"null"'
