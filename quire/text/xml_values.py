"""Arguments that a model writes as bare text, as JSON. Owns which type a text has.

The function's schema says whether `5` is a number or a text. Invariants: the JSON does not depend on how the text was
cut; a text for which the schema allows text alone is never held back, any other one up to `MAX_HELD` characters. What
is longer is a text unless it begins as JSON of an allowed type. Such JSON is streamed where the schema has no text, and
else held up to `MAX_JSON` characters, as numbers are; what goes on as JSON that far is taken for JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from quire.text.reasoning import SPACE

MAX_HELD: Final = 4096
"""Characters of a value that is no plain text: a number, or JSON in which little is written at length."""
MAX_JSON: Final = 1 << 16
"""Characters of JSON where the schema allows a text too: whether it is whole is known at its end alone."""
MAX_DEPTH: Final = 8
_TEXT: Final = "string"
TEXT_ONLY: Final = frozenset((_TEXT,))
_BY_KIND: Final = {dict: "object", list: "array", str: _TEXT, bool: "boolean", int: "integer", float: "number"}
_WORDS: Final = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}

JsonObject = dict[str, Any]


def types_of(parameters: JsonObject, key: str) -> frozenset[str] | None:
    """JSON types that a function's schema allows for an argument; None: any."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return _types(schema, parameters, {}, 0)


def _types(
    schema: object, root: JsonObject, referred: dict[str, frozenset[str] | None], depth: int
) -> frozenset[str] | None:
    """referred: of what was referred to so far, so that time is linear in the schema."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else [one for one in named if isinstance(one, str)])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_BY_KIND.get(type(one), "null") for one in values)
    target = schema.get("$ref")
    if isinstance(target, str):
        if target not in referred:
            referred[target] = None  # what refers to itself allows any
            referred[target] = _types(_referred(target, root), root, referred, depth + 1)
        return referred[target]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list) and (name != "allOf" or len(schema[name]) == 1):
            found = [_types(one, root, referred, depth + 1) for one in schema[name]]
            known = [one for one in found if one is not None]
            return frozenset[str]().union(*known) if len(known) == len(found) else None
    return None


def parts_of(schema: Any, root: JsonObject) -> list[Any]:
    """Schemas that a value has to fit all: this one, and behind it what it refers to in the same document, and its case
    of `allOf` if that is the only one. They are copies without what leads to others."""
    found: list[Any] = []
    todo = [schema]
    while todo:
        one = todo.pop()
        behind = _behind(one, root) if isinstance(one, dict) and len(found) < MAX_DEPTH else {}
        todo += behind.values()
        found.append({name: value for name, value in one.items() if name not in behind} if behind else one)
    return found


def _behind(schema: JsonObject, root: JsonObject) -> dict[str, JsonObject | bool]:
    """What else a value has to fit, by the keyword that says so."""
    target, cases = schema.get("$ref"), schema.get("allOf")
    found = {
        "allOf": cases[0] if isinstance(cases, list) and len(cases) == 1 else None,
        "$ref": _referred(target, root) if isinstance(target, str) else None,
    }
    return {name: one for name, one in found.items() if isinstance(one, dict | bool)}


def has_type(value: Any, schema: JsonObject) -> bool:
    """Whether a schema's `type` allows a value. A whole number is an integer, also as 1.0."""
    named = schema.get("type")
    allowed = {named} if isinstance(named, str) else set(map(str, named)) if isinstance(named, list) else None
    kind = _BY_KIND.get(type(value), "null")
    kinds = {kind, "number"} if kind == "integer" else {kind}
    if isinstance(value, float) and value.is_integer():
        kinds.add("integer")
    return allowed is None or not allowed.isdisjoint(kinds)


def enumerated(schemas: Sequence[JsonObject]) -> list[Any] | None:
    """Values that fit all `enum`, `const` and `type` of these schemas; None: they enumerate none."""
    lists = [one["enum"] for one in schemas if "enum" in one]
    lists += [[one["const"]] for one in schemas if "const" in one]
    if not lists:
        return None
    others = [set(map(comparable, values)) for values in lists[1:]]
    return [
        value
        for value in lists[0]
        if all(comparable(value) in other for other in others) and all(has_type(value, one) for one in schemas)
    ]


def comparable(value: Any) -> str:
    """The same for values that are equal in JSON: 1 and 1.0, but not true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _referred(target: str, root: JsonObject) -> object:
    node: object = root
    for name in target.removeprefix("#/").split("/"):
        node = node.get(name) if isinstance(node, dict) else None
    return node


class ValueWriter:
    """One value. types: as `types_of` says. trims: a line end at each side belongs to the format."""

    def __init__(self, types: frozenset[str] | None, *, trims: bool) -> None:
        self._types = types
        self._trims = trims
        self._has_begun = False
        self._line_end = ""
        """The newest one, which may be the format's."""
        self._held: str | None = None if types == TEXT_ONLY else ""
        """None: what comes is written as it comes."""
        self._bound = MAX_HELD
        """Of what is held."""
        self._is_text = True
        self._is_open = False

    def feed(self, text: str) -> str:
        """JSON of what this text completes."""
        if self._trims:
            text = self._trimmed(text)
        if self._held is None:
            return self._write(text)
        self._held += text
        if len(self._held) > MAX_HELD == self._bound and self._waits(self._held[: MAX_HELD + 1]):
            self._bound = MAX_JSON
        if len(self._held) <= self._bound:
            return ""
        held, self._held = self._held, None
        self._is_text = not self._is_json(held[: self._bound + 1])
        return self._write(held)

    def finish(self) -> str:
        """The rest."""
        if self._held is None:
            return (self._write("") + '"') if self._is_text else ""
        return json_of(self._held, self._types)

    def cut(self) -> str:
        """The rest, where the value has no end: it stays open."""
        held, self._held = self._held, None
        if not held:
            return ""
        self._is_text = self._types is None or _TEXT in self._types
        return self._write(held)

    def _write(self, text: str) -> str:
        if not self._is_text:
            return text
        begin = "" if self._is_open else '"'
        self._is_open = True
        return begin + json.dumps(text, ensure_ascii=False)[1:-1]

    def _trimmed(self, text: str) -> str:
        if text and not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        if not text:
            return ""
        text = self._line_end + text
        self._line_end = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")

    def _waits(self, text: str) -> bool:
        """Whether a value of which this is the beginning can be JSON, and something else is allowed or likely."""
        may_differ = self._types is None or _TEXT in self._types or text.lstrip(SPACE)[:1] not in ("{", "[")
        return may_differ and self._is_json(text)

    def _is_json(self, text: str) -> bool:
        """Whether a value of which this is the beginning can be JSON of an allowed type."""
        kinds = _BY_FIRST.get(text.lstrip(SPACE)[:1], frozenset())
        return not kinds.isdisjoint(kinds if self._types is None else self._types) and _begins_json(text)


def json_of(text: str, types: frozenset[str] | None) -> str:
    """A whole value as JSON: as it is where it is JSON of an allowed type, else as a text."""
    bare = text.strip(SPACE)
    word = _WORDS.get(bare.lower())
    if word is not None and types is not None and word in types:
        return "null" if word == "null" else bare.lower()
    try:
        value = _parsed(bare)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    found = _BY_KIND.get(type(value), "null")
    fits = types is None or found in types or (found == "integer" and "number" in types)
    if not fits and found == "number" and types is not None and "integer" in types:
        fits = value.is_integer() or _TEXT not in types  # what is no integer may be a text
    return bare if fits else json.dumps(text, ensure_ascii=False)


def _begins_json(text: str) -> bool:
    """Whether this is JSON, or the beginning of it."""
    if _is_begun(text):
        return True
    head = text.rstrip(_DIGITS)
    return _BEGUN_NUMBER.fullmatch(text, len(head)) is not None and _is_begun(head + "0")


def _is_begun(text: str) -> bool:
    """The same, but for a number that ends in the middle (`1e`)."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (ValueError, RecursionError) as error:
        return "truncated" in str(error)
    return True


def _parsed(text: str) -> Any:
    """ValueError or RecursionError if it is not JSON. Long numbers are some number of their type."""
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:  # it has a number beyond a float's range, or a very long one
        msgspec.json.decode(text, type=msgspec.Raw)
        return json.loads(text, parse_int=lambda _: 0)


_NUMBERS: Final = frozenset(("integer", "number"))
_BY_FIRST: Final = {
    '"': TEXT_ONLY, "{": frozenset(("object",)), "[": frozenset(("array",)), **dict.fromkeys("-0123456789", _NUMBERS),
}  # fmt: skip
"""Types of JSON that may be long, by the first character."""
_DIGITS: Final = "0123456789.eE+-"
_BEGUN_NUMBER: Final = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][-+]?[0-9]*)?)?")
