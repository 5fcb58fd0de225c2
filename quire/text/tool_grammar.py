"""Grammars that make a model call tools in its own format. Owns their text for each format of `tool_formats.py`.
Does not own arguments as bare text (`xml_grammar.py`), nor where calls stand in a Harmony answer (`harmony_frame.py`).
Invariant: what fits a grammar made here is read by the format's reader as calls of the tools that it was made for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from quire.text import harmony
from quire.text.grammar import SPACE_PATTERN, quoted, tagged_text
from quire.text.grammar_marks import literal, written
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_calls import FORMATS
from quire.text.xml_calls import XML_FORMATS
from quire.text.xml_grammar import argument_rules

JsonObject = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call."""

    name: str
    parameters: JsonObject
    """A JSON schema of an object."""
    strict: bool
    """False: keywords of the schema that cannot be enforced are left out instead of being refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """Fixed text around the calls of one format."""

    begin: str
    """From a call's beginning to its name."""
    middle: str
    """From the name to the arguments."""
    end: str
    separator: str
    """Between two calls."""
    list_ends: tuple[str, str] | None = None
    """The mark stands once, before a list of calls, which these surround."""

    @property
    def is_list(self) -> bool:
        return self.list_ends is not None


_SHAPES = {
    "hermes": _Shape('\n{"name": "', '", "arguments": ', "}\n", "\n"),
    "llama3_json": _Shape('{"name": "', '", "parameters": ', "}", "; "),
    "mistral": _Shape('{"name": "', '", "arguments": ', "}", ", ", ("[", "]")),
    "deepseek_v3": _Shape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        ("", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": _Shape(
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "", ("", "<｜tool▁calls▁end｜>")
    ),
    "glm45": _Shape("", "\n", "</tool_call>", "\n"),
    "qwen3_coder": _Shape("\n<function=", ">\n", "</function>\n</tool_call>", "\n"),
    "minimax_m2": _Shape('<invoke name="', '">\n', "</invoke>\n", "", ("\n", "</minimax:tool_call>")),
}  # fmt: skip


def _mark(style: str) -> str:
    return XML_FORMATS[style].mark if style in XML_FORMATS else FORMATS[style].mark


def _needs_mark(style: str) -> bool:
    return style in XML_FORMATS or FORMATS[style].needs_mark


def call_grammar(style: str, tools: Sequence[OfferedTool], tokenizer: HfTokenizer, *, at_most_one: bool) -> str:
    """Lark for a text that is one call or more of these tools, and nothing else."""
    if style == harmony.TOOLS:
        return "start: call\n" + _harmony_calls(tools, tokenizer)
    shape = _SHAPES[style]
    calls = _several(shape, tokenizer, at_most_one=at_most_one)
    if shape.is_list:
        calls = f"{literal(_mark(style), tokenizer)} {calls}"
    return f"start: {calls}\n" + _calls(style, tools, tokenizer, with_mark=not shape.is_list)


def auto_grammar(style: str, tools: Sequence[OfferedTool], tokenizer: HfTokenizer, *, at_most_one: bool) -> str:
    """Lark for free text in which a call, once it is announced, is one of these tools."""
    if style == harmony.TOOLS:
        answer = f"answer: {answer_head(tokenizer)} /(?s:.*)/\n"
        return "start: call | answer\n" + answer + _harmony_calls(tools, tokenizer)
    shape, mark = _SHAPES[style], _mark(style)
    if not _needs_mark(style):
        rules = _calls(style, tools, tokenizer, with_mark=False)
        several = _several(shape, tokenizer, at_most_one=at_most_one)
        return f"start: {several} | free\nfree: /([^{{](?s:.*))?/\n{rules}"
    if shape.is_list:
        rules = _calls(style, tools, tokenizer, with_mark=False)
        parts = [(mark, mark, _several(shape, tokenizer, at_most_one=at_most_one), "")]
        return tagged_text(parts, lambda text: literal(text, tokenizer), at_most_one=True) + "\n" + rules
    rules = _calls(style, tools, tokenizer, with_mark=False)
    parts = [(mark, mark, "call", "")]
    if style in XML_FORMATS and XML_FORMATS[style].may_lack_mark:
        begin = XML_FORMATS[style].begin
        parts.append((begin, begin, "bare", ""))
        rules += _bare_calls(style, tools, tokenizer)
    return tagged_text(parts, lambda text: literal(text, tokenizer), at_most_one=at_most_one) + "\n" + rules


def _bare_calls(style: str, tools: Sequence[OfferedTool], tokenizer: HfTokenizer) -> str:
    """The rule `bare`: calls whose mark is missing, from behind their beginning on. The last tag may be missing too."""
    middle, (first, last) = _SHAPES[style].middle, XML_FORMATS[style].closes
    calls = [f"{written(tool.name + middle, tokenizer)} args_{at}" for at, tool in enumerate(tools)]
    return f"bare: ({' | '.join(calls)}) {written(first, tokenizer)} ({written(chr(10) + last, tokenizer)})?\n"


def _several(shape: _Shape, tokenizer: HfTokenizer, *, at_most_one: bool) -> str:
    """One call or more, without the mark."""
    begin, end = shape.list_ends or ("", "")
    more = "" if at_most_one else f"({written(shape.separator, tokenizer)} call)*"
    return " ".join(filter(None, (written(begin, tokenizer), "call", more, written(end, tokenizer))))


def _calls(style: str, tools: Sequence[OfferedTool], tokenizer: HfTokenizer, *, with_mark: bool) -> str:
    """The rules `call` and those that it needs."""
    shape = _SHAPES[style]
    mark = literal(_mark(style), tokenizer) + " " if with_mark and _needs_mark(style) else ""
    closing = f" {literal('</tool_call>', tokenizer)}" if style == "hermes" else ""
    rules = [f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        head = written(shape.begin + tool.name + shape.middle, tokenizer)
        rules.append(f"call_{at}: {mark}{head} args_{at} {written(shape.end, tokenizer)}{closing}")
        if style in XML_FORMATS:
            rules += argument_rules(style, at, tool.parameters, tokenizer, strict=tool.strict)
        else:
            rules.append(_arguments(at, tool))
    return "\n".join(rules) + "\n"


def _harmony_calls(tools: Sequence[OfferedTool], tokenizer: HfTokenizer) -> str:
    """The same in messages: a call ends the turn. It names its function on either side of the channel."""
    channel, constrain, message = (
        literal(mark, tokenizer) for mark in (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE)
    )
    rules = [f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        name = harmony.FUNCTIONS + tool.name
        behind = f'{channel} {quoted(f"commentary to={name} ")} {constrain} "json"'
        before = f'{quoted(f" to={name}")} {channel} "commentary " {constrain}? "json"'
        rules.append(f"call_{at}: ({behind} | {before}) {message} args_{at}")
        rules.append(_arguments(at, tool))
    return "\n".join(rules) + "\n"


def answer_head(tokenizer: HfTokenizer) -> str:
    """Lark for the head of a Harmony message to the user."""
    return f'{literal(harmony.CHANNEL, tokenizer)} "final" {literal(harmony.MESSAGE, tokenizer)}'


def note_rules(tokenizer: HfTokenizer) -> str:
    """Lark for Harmony messages that come before: a `thought`, or a `note`, which may also be a preamble."""
    channel, message, end, start = (
        literal(mark, tokenizer) for mark in (harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.START)
    )
    rest = f'{message} /(?s:.*)/ {end} {start} "{harmony.ROLE}"'
    return f'note: thought | {channel} "commentary" {rest}\nthought: {channel} "analysis" {rest}\n'


def _arguments(at: int, tool: OfferedTool) -> str:
    """The rule of one function's arguments."""
    options = {"whitespace_pattern": SPACE_PATTERN, "lenient": not tool.strict}
    schema = {"type": "object", **tool.parameters, "x-guidance": options}
    return f"args_{at}: %json {json.dumps(schema)}"
