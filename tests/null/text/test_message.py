"""Reasoning and tool calls in a text: streamed pieces join to the message, and hostile text stays text."""

from __future__ import annotations

import json
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from reading import joined

from quire.text.message import MessageReader, WholeMessage
from quire.text.reasoning import ReasoningReader
from quire.text.tool_calls import FORMATS, ToolReader
from quire.text.tool_formats import format_of

NAMES = ("get_weather", "f", "a.b-c")


def reader(style: str | None, inside: bool | None = None) -> MessageReader:
    reasoning = None if inside is None else ReasoningReader(inside)
    return MessageReader(reasoning, None if style is None else ToolReader(FORMATS[style], NAMES))


def whole(style: str | None, text: str, inside: bool | None = None) -> WholeMessage:
    return reader(style, inside).whole(text)


def streamed(style: str | None, chunks: list[str], inside: bool | None = None) -> WholeMessage:
    return joined(reader(style, inside), chunks)


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
V3_FIRST = CALLS["deepseek_v3"].removesuffix("<｜tool▁calls▁end｜>")
V3_SECOND = CALLS["deepseek_v3"].removeprefix("<｜tool▁calls▁begin｜>")
V31_FIRST = CALLS["deepseek_v31"].removesuffix("<｜tool▁calls▁end｜>")
TRICKY = [
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "<",
    "<think>",
    "</think>",
    "</th",
    "[TOOL_CALLS]",
    "[TOOL",
    "[",
    "]",
    "<|python_tag|>",
    '{"name": "f", "arguments": {',
    '{"name":"get_weather","parameters":{',
    '"x": "}\\"{"',
    "}",
    "{",
    '"',
    "\\",
    "\n",
    " ",
    "f{",
    "a.b-c[ARGS]{",
    ";",
    ",",
    "é",
    "word",
    '{"name": "nobody", "arguments": {',
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "```",
    *CALLS.values(),
]
texts = st.lists(st.sampled_from(TRICKY), max_size=12).map("".join)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    if draw(st.booleans()):
        places = list(range(len(text)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=600)
@given(cut=cuts(), style=st.sampled_from([None, *FORMATS]), inside=st.sampled_from([None, False, True]))
def test_any_cut_gives_the_same_message(cut: tuple[str, list[str]], style: str | None, inside: bool | None) -> None:
    text, chunks = cut
    assert streamed(style, chunks, inside) == whole(style, text, inside)


@settings(max_examples=300)
@given(text=texts, style=st.sampled_from(sorted(FORMATS)))
def test_nothing_but_space_and_heads_is_lost(text: str, style: str) -> None:
    message = whole(style, text)
    if not message.calls:
        assert (message.content or "") == text
    kept = (message.content or "") + "".join(call.name + call.arguments for call in message.calls)
    assert kept.count("word") == text.count("word") and kept.count("é") == text.count("é")


@pytest.mark.parametrize("style", sorted(FORMATS))
def test_one_call(style: str) -> None:
    message = whole(style, CALLS[style])
    assert message.content is None
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("style", "text", "calls", "content"),
    [
        ("hermes", "Sure.\n" + CALLS["hermes"] + "\n" + CALLS["hermes"] + "\n", 2, "Sure.\n"),
        ("hermes", CALLS["hermes"] + " Done.", 1, " Done."),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>', 1, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', 1, None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', 1, None),
        (
            "hermes",
            'A call is written "<tool_call>" and then JSON.',
            0,
            'A call is written "<tool_call>" and then JSON.',
        ),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', 0, None),
        ("hermes", '<tool_call>{"name": ', 0, '<tool_call>{"name": '),
        ("hermes", CALLS["llama3_json"], 0, CALLS["llama3_json"]),
        ("hermes", "<tool_call><tool_call>" + CALLS["hermes"], 1, "<tool_call><tool_call>"),
        ("llama3_json", CALLS["llama3_json"] + "; " + CALLS["llama3_json"], 2, None),
        ("llama3_json", "<|python_tag|>" + CALLS["llama3_json"], 1, None),
        ("llama3_json", "Look: " + CALLS["llama3_json"], 0, "Look: " + CALLS["llama3_json"]),
        ("llama3_json", '{"name": "f", "arguments": {}}', 1, None),
        ("llama3_json", '{"a": 1}', 0, '{"a": 1}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]', 2, None),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"b": [2]}', 2, None),
        ("mistral", "[TOOL_CALLS][TOOL_CALLS]f{}", 1, "[TOOL_CALLS]"),
        ("mistral", "[1, 2]", 0, "[1, 2]"),
        ("deepseek_v3", f"Sure.\n{CALLS['deepseek_v3']}", 1, "Sure.\n"),
        ("deepseek_v3", f"{V3_FIRST}\n{V3_SECOND}", 2, None),
        ("deepseek_v3", f"{V3_FIRST} Done.", 1, " Done."),
        ("deepseek_v3", CALLS["deepseek_v31"], 0, CALLS["deepseek_v31"]),
        ("deepseek_v31", CALLS["deepseek_v3"], 0, CALLS["deepseek_v3"]),
        ("deepseek_v31", CALLS["deepseek_v31"].replace(">f<", ">nobody<"), 0, None),
        ("deepseek_v31", f"{V31_FIRST}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>", 2, None),
    ],
)
def test_cases(style: str, text: str, calls: int, content: str | None) -> None:
    message = whole(style, text)
    assert len(message.calls) == calls
    assert message.content == (text if not calls and content is None else content)
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.calls)


def test_a_call_that_is_cut_is_a_call() -> None:
    message = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": "xy')
    assert message.content is None and [call.arguments for call in message.calls] == ['{"a": "xy']
    cut_end = whole("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_')
    assert cut_end.content is None and json.loads(cut_end.calls[0].arguments) == {"a": 1}


@pytest.mark.parametrize("style", sorted(FORMATS))
@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "<tool_call>",
        "{",
        "[",
        '{"name": "f", ',
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        " ",
        '<tool_call>{"name":"f"',
        "<tool_call>" + " " * 50,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    ],
)
def test_very_many_marks_takes_linear_time(style: str, unit: str) -> None:
    text = unit * ((1_000_000 if unit == "<" else 100_000) // len(unit))
    one, started_s = reader(style, False), time.process_time()
    kept = sum(len(piece.text) for at in range(0, len(text), 37) for piece in one.feed(text[at : at + 37]))
    kept += sum(len(piece.text) for piece in one.finish())
    assert time.process_time() - started_s < 4
    assert kept == len(text) if one.n_calls == 0 else kept > 0


@pytest.mark.parametrize("style", sorted(FORMATS))
def test_long_arguments_are_streamed(style: str) -> None:
    """Ten thousand brackets and a megabyte of string: nothing waits for the end."""
    head = CALLS[style].partition('"a"')[0]
    one = reader(style)
    one.feed(head + '"a": ' + "[" * 10_000 + '"')
    out = sum(len(piece.text) for _ in range(1000) for piece in one.feed("x" * 1000))
    assert out == 1_000_000


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm\n</think>\n\nHi", "hm\n", "Hi"),
        (True, "hm </think> Hi", "hm ", "Hi"),
        (True, "hm", "hm", None),
        (True, "hm </th", "hm </th", None),
        (False, "Hi <think>x</think>", None, "Hi <think>x</think>"),
        (False, "  <think></think>ok", None, "ok"),
        (False, "<thin", None, "<thin"),
        (False, "<think>a</think>b</think>", "a", "b</think>"),
    ],
)
def test_reasoning(inside: bool, text: str, reasoning: str | None, content: str | None) -> None:
    message = whole(None, text, inside)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_calls_in_reasoning_are_not_calls() -> None:
    message = whole("hermes", "<think>" + CALLS["hermes"] + "</think>" + CALLS["hermes"], False)
    assert message.reasoning == CALLS["hermes"] and len(message.calls) == 1


def test_formats_are_known_by_their_templates() -> None:
    assert format_of(['... <tool_call>\n{"name": <function-name>, "arguments": <args>}']) == "hermes"
    assert format_of(["<|python_tag|> ... parameters"]) == "llama3_json"
    assert format_of(["{{ '[TOOL_CALLS]' }}"]) == "mistral"
    assert format_of(["<tool_call><function=name><parameter=x> arguments"]) == "qwen3_coder"
    assert format_of(["<tool_call>{function-name}\n<arg_key>"]) == "glm45"
    assert format_of(['<minimax:tool_call>\n<invoke name="tool-name-1">']) == "minimax_m2"
    assert format_of(["'<｜tool▁calls▁begin｜>' ... '```json'"]) == "deepseek_v3"
    assert format_of(["'<｜tool▁calls▁begin｜>'"]) == "deepseek_v31"
    assert format_of(["<tool_call><function=name> arguments"]) is None
    assert format_of(["plain"]) is None
