"""Grammars of arguments that are written as bare text in tags. Owns what of a schema can be enforced there.

A text is free up to its closing tag, or one of an enumeration; everything else is JSON of its own schema.
Invariant: what fits is read by `xml_calls.py` as arguments that fit the schema, or the schema is refused.
"""

from __future__ import annotations

import json
from typing import Final

from quire.core.errors import shown
from quire.text.grammar import QUOTE, SPACE_PATTERN, quoted, refused
from quire.text.grammar_marks import literal, written
from quire.text.tokenizer import HfTokenizer
from quire.text.xml_calls import is_key
from quire.text.xml_values import TEXT_ONLY, JsonObject, resolved, types_of

VALUES: Final = {
    "glm45": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    "qwen3_coder": ("<parameter=", ">\n", "\n</parameter>"),
    "minimax_m2": ('<parameter name="', '">', "</parameter>"),
}
"""What stands before the name of an argument, behind it, and behind the value."""
_BOUNDS: Final = ("pattern", "minLength", "maxLength", "format", "anyOf", "oneOf")
"""Of a text, which nothing enforces here."""
_KNOWN: Final = frozenset((
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description", "$schema",
    "$id", "$comment", "examples", "default",
))  # fmt: skip
"""Keywords of the arguments together that are kept, or say nothing."""
_ANY_KEY: Final = "/[A-Za-z0-9_.\\-]{1,64}/"


def argument_rules(style: str, at: int, parameters: JsonObject, tokenizer: HfTokenizer, *, strict: bool) -> list[str]:
    """The rule `args_{at}` and those that it needs. RequestError for a strict schema that cannot be enforced."""
    before, between, end = VALUES[style]
    close = f"{written(end, tokenizer)} {quoted(chr(10))}"
    text = f"text_{at}{_until(end, tokenizer)}"
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, dict | None):
        raise refused(f"the properties of a function's parameters are {shown(properties)}, and no object")
    needed = set(map(str, required)) if isinstance(required, list) else set()
    others = (parameters.keys() - _KNOWN if strict else set()) | (needed - set(properties or ()))
    if others:
        raise refused(f"this model writes arguments as bare text, for which {shown(min(others))} cannot be enforced")
    if not properties:
        if parameters.get("additionalProperties") is False:
            return [f"args_{at}: {quoted('')}"]
        head = f"{written(before, tokenizer)} {_ANY_KEY} {written(between, tokenizer)}"
        return [f"args_{at}: ({head} text_{at} {quoted(chr(10))})*", text]
    names, rules = [], [text]
    for number, key in enumerate(properties):
        if not is_key(key):
            if key in needed:
                raise refused(f"no text may name the argument {shown(key)}")
            continue
        name = f"arg_{at}_{number}"
        value, more = _value(name, parameters, key, close, f"text_{at} {quoted(chr(10))}", strict=strict)
        rules += [f"{name}: {written(before + key + between, tokenizer)} {value}", *more]
        names.append(name if key in needed else f"{name}?")
    return [f"args_{at}: {' '.join(names) or quoted('')}", *rules]


def _until(end: str, tokenizer: HfTokenizer) -> str:
    """The rest of a rule for free text up to a tag, and the tag. No text can hold one that is a control token."""
    tag = end.lstrip("\n")
    closing, line_ends = literal(tag, tokenizer), "\\n" * (len(end) - len(tag))
    if closing.startswith(QUOTE):
        return f"[lazy]: /(?s:.*)/ {quoted(end)}"
    return f": /(?s:.*){line_ends}/ {closing}"


def _value(
    name: str, parameters: JsonObject, key: str, close: str, free: str, *, strict: bool
) -> tuple[str, list[str]]:
    """(a value with what closes it, rules that it needs)."""
    found = resolved(parameters["properties"][key], parameters)
    if not isinstance(found, dict | bool):
        raise refused(f"the schema of the argument {shown(key)} is {shown(found)}, and no object")
    schema: JsonObject = {} if isinstance(found, bool) else found
    if types_of(parameters, key) != TEXT_ONLY:
        own = schema | {kind: parameters[kind] for kind in ("$defs", "definitions") if kind in parameters}
        own["x-guidance"] = {"whitespace_pattern": SPACE_PATTERN, "lenient": not strict}
        return f"{name}_json {close}", [f"{name}_json: %json {json.dumps(own)}"]
    if strict and any(bound in schema for bound in _BOUNDS):
        raise refused(f"this model writes {shown(key)} as bare text, which cannot be bounded but by enum")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return f"({' | '.join(quoted(str(one)) for one in values)}) {close}", []
    return free, []
