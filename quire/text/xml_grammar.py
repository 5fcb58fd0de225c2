"""Grammars of arguments that are written as bare text in tags. Owns what of a schema can be enforced there.

A text is free up to its closing tag, also where it may be a null or a number instead, or one of an enumeration;
everything else is JSON of its own schema.
Invariant: what fits is read by `xml_calls.py` as arguments that fit the schema, or the schema is refused. One exception
is left: a text in JSON may quote the tag that closes its argument, with one behind it that goes on with the call.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from quire.core.errors import shown
from quire.text.grammar import QUOTE, SPACE_PATTERN, quoted, refused
from quire.text.grammar_marks import literal, written
from quire.text.tokenizer import HfTokenizer
from quire.text.xml_calls import XML_FORMATS, is_key
from quire.text.xml_values import (
    TEXT_ONLY,
    JsonObject,
    ValueWriter,
    comparable,
    enumerated,
    has_type,
    parts_of,
    types_of,
)

VALUES: Final = {
    "glm45": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    "qwen3_coder": ("<parameter=", ">\n", "\n</parameter>"),
    "minimax_m2": ('<parameter name="', '">', "</parameter>"),
}
"""What stands before the name of an argument, behind it, and behind the value."""
_BOUNDS: Final = (
    "pattern", "minLength", "maxLength", "format", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
)  # fmt: skip
"""Of a text, which nothing enforces here."""
_SAYS_NOTHING: Final = frozenset((
    "title", "description", "$comment", "examples", "default", "$defs", "definitions", "deprecated", "readOnly",
    "writeOnly", "nullable", "$schema",
))  # fmt: skip
"""Keywords that ask nothing of a value."""
_SCALARS: Final = frozenset(("string", "null", "boolean", "integer", "number"))
_KNOWN: Final = _SAYS_NOTHING | {"type", "properties", "required", "additionalProperties", "$id"}
"""Keywords of the arguments together that are kept, or say nothing."""
_ANY_KEY: Final = "/[A-Za-z0-9_.\\-]{1,64}/"


def argument_rules(style: str, at: int, parameters: JsonObject, tokenizer: HfTokenizer, *, strict: bool) -> list[str]:
    """The rule `args_{at}` and those that it needs. RequestError for a strict schema that cannot be enforced, and for
    a required argument that no value fits."""
    return _Arguments(style, at, parameters, tokenizer, strict).rules()


@dataclasses.dataclass(frozen=True, slots=True)
class _Arguments:
    """Of one function, in one format."""

    style: str
    at: int
    """The function's number."""
    parameters: JsonObject
    tokenizer: HfTokenizer
    strict: bool

    def rules(self) -> list[str]:
        """As `argument_rules` says."""
        properties, required = self.parameters.get("properties"), self.parameters.get("required")
        if not isinstance(properties, dict | None):
            raise refused(f"the properties of a function's parameters are {shown(properties)}, and no object")
        needed = set(map(str, required)) if isinstance(required, list) else set()
        self._check_keywords(properties or {}, needed)
        if not properties:
            return self._free_rules()
        names, rules = [], [self._text_rule()]
        for number, key in enumerate(properties):
            value = self._value(f"arg_{self.at}_{number}", key) if is_key(key) else None
            if value is None and key in needed:
                what = "no value fits the schema of" if is_key(key) else "no text may name"
                raise refused(f"{what} the argument {shown(key)}")
            if value is not None:
                rules += value
                names.append(f"arg_{self.at}_{number}{'' if key in needed else '?'}")
        return [f"args_{self.at}: {' '.join(names) or quoted('')}", *rules]

    def _check_keywords(self, properties: JsonObject, needed: set[str]) -> None:
        others = needed - properties.keys()
        if self.strict:
            others |= self.parameters.keys() - _KNOWN
            if not properties and self.parameters.get("additionalProperties") not in (None, True, False, {}):
                others.add("additionalProperties")
        if others:
            raise refused(
                f"this model writes arguments as bare text, for which {shown(min(others))} cannot be enforced"
            )

    def _free_rules(self) -> list[str]:
        """Of arguments that the schema does not name."""
        if self.parameters.get("additionalProperties") is False:
            return [f"args_{self.at}: {quoted('')}"]
        before, between, _ = VALUES[self.style]
        head = f"{written(before, self.tokenizer)} {_ANY_KEY} {written(between, self.tokenizer)}"
        return [f"args_{self.at}: ({head} text_{self.at} {quoted(chr(10))})*", self._text_rule()]

    def _text_rule(self) -> str:
        """Free text up to the closing tag, and the tag. No text can hold one that is a control token. No line end need
        stand before it, for the reader does not ask for one."""
        closing = literal(XML_FORMATS[self.style].end, self.tokenizer)
        return f"text_{self.at}{'[lazy]' if closing.startswith(QUOTE) else ''}: /(?s:.*)/ {closing}"

    def _value(self, name: str, key: str) -> list[str] | None:
        """The rule `name` of an argument, and those that it needs; None: no value fits."""
        schemas = self._parts(self.parameters["properties"][key])
        for schema in schemas:
            self._check_schema(schema, key)
        if False in schemas:
            return None
        parts = self._joined_cases([{} if schema is True else schema for schema in schemas])
        values, types = enumerated(parts), types_of(self.parameters, key)
        if types == TEXT_ONLY and self.strict and any(bound in part for bound in _BOUNDS for part in parts):
            raise refused(f"this model writes {shown(key)} as bare text, which cannot be bounded but by enum")
        if types == TEXT_ONLY and not all(has_type("", part) for part in parts):
            return None
        before, between, end = VALUES[self.style]
        head = f"{name}: {written(before + key + between, self.tokenizer)}"
        if values is not None:
            ways = [(value, self._way(value, types)) for value in values]
            values = [value for value, way in ways if way is not None]
            if not values:
                return None
            has_one_way = not any(isinstance(value, dict | list) for value in values)
            if types == TEXT_ONLY or (has_one_way and _say_values_alone(parts)):
                return self._choice(head, name.upper(), [way for _, way in ways if way is not None])
        if types == TEXT_ONLY or self._takes_any_text(parts, types):
            return [f"{head} text_{self.at} {quoted(chr(10))}"]
        schema = self._json_schema(parts, values)
        tail = f"{written(end, self.tokenizer)} {quoted(chr(10))}"
        return [f"{head} {name}_json {tail}", f"{name}_json: %json {json.dumps(schema)}"]

    def _parts(self, schema: Any) -> list[Any]:
        """As `parts_of` says. Clients that write all fields write an `enum` that is null."""
        return [
            {name: one for name, one in part.items() if name != "enum" or one is not None}
            if isinstance(part, dict) and not self.strict
            else part
            for part in parts_of(schema, self.parameters)
        ]

    def _joined_cases(self, parts: list[JsonObject]) -> list[JsonObject]:
        """The same schemas, where cases that are all enumerations or null become one enumeration."""
        found = []
        for part in parts:
            for name in ("anyOf", "oneOf"):
                values = self._values_of(part.get(name), at_most_once=name == "oneOf")
                if values is not None:
                    part = {key: one for key, one in part.items() if key != name}
                    found.append({"enum": values})
            found.append(part)
        return found

    def _values_of(self, cases: Any, *, at_most_once: bool) -> list[Any] | None:
        """All values of cases; None: one does not enumerate, or says more. at_most_once: without those of several."""
        found: dict[str, Any] = {}
        repeated = set()
        for case in cases if isinstance(cases, list) else []:
            values = _all_values(self._parts(case))
            if values is None:
                return None
            own = {comparable(value): value for value in values}
            repeated |= found.keys() & own.keys()
            found |= own
        none = repeated if at_most_once else ()
        return [value for key, value in found.items() if key not in none] if cases else None

    def _takes_any_text(self, parts: list[JsonObject], types: frozenset[str] | None) -> bool:
        """Whether every text is read as something that fits, as where null is allowed beside a text."""
        *others, last = parts
        cases = last.get("anyOf", [last])
        if types is None or not TEXT_ONLY < types <= _SCALARS or not isinstance(cases, list):
            return False
        says_more = [*others, {name: one for name, one in last.items() if name not in ("type", "anyOf")}]
        says_more += [last] if "anyOf" in last and "type" in last else []
        return not any(part.keys() - _SAYS_NOTHING for part in says_more) and all(
            _is_type_alone(self._parts(case)) for case in cases
        )

    def _check_schema(self, schema: Any, key: str) -> None:
        if not isinstance(schema, dict | bool):
            raise refused(f"the schema of the argument {shown(key)} is {shown(schema)}, and no object")
        values = [] if isinstance(schema, bool) else schema.get("enum", [])
        if not isinstance(values, list):
            raise refused(f"the enum of the argument {shown(key)} is {shown(values)}, and no list")

    def _json_schema(self, parts: list[JsonObject], values: list[Any] | None) -> JsonObject:
        """Of an argument that is written as JSON."""
        enumerates = () if values is None else ("enum", "const")
        own = [{name: one for name, one in part.items() if name not in enumerates} for part in parts]
        own = [*(part for part in own[:-1] if part.keys() - _SAYS_NOTHING), own[-1]]
        if values is not None:
            own[-1]["enum"] = values
        schema = {"allOf": own} if len(own) > 1 else own[0]
        schema |= {kind: self.parameters[kind] for kind in ("$defs", "definitions") if kind in self.parameters}
        return schema | {"x-guidance": {"whitespace_pattern": SPACE_PATTERN, "lenient": not self.strict}}

    def _way(self, value: Any, types: frozenset[str] | None) -> str | None:
        """How a value is written so that it is read as what it is: bare, or as JSON. None: in neither way. What quotes
        the closing tag is not written: the lexer, which never goes back, would lose values with which it begins."""
        ways = [value] if isinstance(value, str) else []
        ways += [] if types == TEXT_ONLY else [json.dumps(value, ensure_ascii=False)]
        for way in ways:
            if XML_FORMATS[self.style].end not in way and _is_read_as(way, types, value):
                return self._framed(way)
        return None

    def _framed(self, text: str) -> str:
        """A text with the line ends that the reader takes for the tags' own."""
        if not XML_FORMATS[self.style].trims or VALUES[self.style][1].endswith("\n"):
            return text
        return "\n" * text.startswith("\n") + text + "\n" * text.endswith("\n")

    def _choice(self, head: str, name: str, texts: list[str]) -> list[str]:
        """The rule of an argument that is one of these texts. They are one terminal, `name`, with the tag that closes
        them: one text may begin with another, and the lexer never goes back."""
        end = VALUES[self.style][2]
        tag = end.lstrip("\n")
        closing, line_ends = literal(tag, self.tokenizer), end.removesuffix(tag)
        if closing.startswith(QUOTE):
            return [f"{head} {name}", f"{name}: ({' | '.join(map(quoted, texts))}) {quoted(end + chr(10))}"]
        return [f"{head} ({' | '.join(quoted(text + line_ends) for text in texts)}) {closing} {quoted(chr(10))}"]


def _is_read_as(text: str, types: frozenset[str] | None, value: Any) -> bool:
    if types == TEXT_ONLY or not isinstance(value, str | list | dict):
        return True
    writer = ValueWriter(types, trims=False)
    found = json.loads(writer.feed(text) + writer.finish())
    return type(found) is type(value) and bool(found == value)


def _all_values(parts: list[Any]) -> list[Any] | None:
    """All that fits these schemas; None: they say more than which values."""
    if not all(isinstance(part, dict) and isinstance(part.get("enum", []), list) for part in parts):
        return None
    if not _say_values_alone(parts):
        return None
    is_null = any(part.get("type") in ("null", ["null"]) for part in parts)
    return enumerated([*parts, {"const": None}] if is_null else parts)


def _is_type_alone(parts: list[Any]) -> bool:
    """Whether types are all that the schemas say, in one place."""
    if not all(isinstance(part, dict) for part in parts):
        return False
    return (
        not any(part.keys() - _SAYS_NOTHING - {"type"} for part in parts) and sum("type" in one for one in parts) == 1
    )


def _say_values_alone(parts: list[JsonObject]) -> bool:
    """Whether types and values are all that the schemas say."""
    return not any(part.keys() - _SAYS_NOTHING - {"type", "enum", "const"} for part in parts)
