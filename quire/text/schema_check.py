"""What a stranger most often gets wrong in a JSON schema, found with its place: names of types, and counts.

Owns the walk over a schema's parts: those of JSON Schema 2020-12 and, of before, `definitions` and `additionalItems`.
Does not own what the grammar library supports (`text/grammar`): everything else is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from quire.core.errors import InvalidParameter, RequestError, shown
from quire.core.failure import Code

TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
MAX_COUNT: Final = (1 << 63) - 1
"""What the grammar library reads."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value is an object of schemas."""
_SINGLE: Final = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTED: Final = ("items", "prefixItems", "allOf", "anyOf", "oneOf")


def checked_schema(schema: Any, where: str) -> Any:
    """The same schema, with counts like 1e9 as integers, as JSON Schema counts them; nothing is changed in place.

    Raises a RequestError whose message names the place: `where` (also its `param`) and the path inside. Schemas are
    nested at most `core.structured.MAX_DEPTH` deep.
    """
    try:
        return _checked(schema, where)
    except InvalidParameter as error:
        raise RequestError(error.message, param=where, code=Code.INVALID_GRAMMAR) from None


def _checked(node: Any, where: str) -> Any:
    if not isinstance(node, dict):
        return node
    found = {**node}
    if "type" in node:
        _check_type(node["type"], f"{where}.type")
    for key in COUNTS:
        if key in node:
            found[key] = _count(node[key], f"{where}.{key}")
    for key in _NAMED:
        if isinstance(node.get(key), dict):
            found[key] = {name: _checked(child, _inside(f"{where}.{key}", name)) for name, child in node[key].items()}
    for key in _SINGLE:
        if isinstance(node.get(key), dict):
            found[key] = _checked(node[key], f"{where}.{key}")
    for key in _LISTED:
        if isinstance(node.get(key), list):
            found[key] = [_checked(child, f"{where}.{key}[{at}]") for at, child in enumerate(node[key])]
    return found


def children(node: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The schemas inside one, each with its place. where: its own."""
    for key in _NAMED:
        if isinstance(node.get(key), dict):
            yield from ((_inside(f"{where}.{key}", name), child) for name, child in node[key].items())
    for key in _SINGLE:
        if isinstance(node.get(key), dict):
            yield f"{where}.{key}", node[key]
    for key in _LISTED:
        if isinstance(node.get(key), list):
            yield from ((f"{where}.{key}[{at}]", child) for at, child in enumerate(node[key]))


def _check_type(value: object, where: str) -> None:
    for one in value if isinstance(value, list) and value else [value]:
        if one not in TYPES:
            raise InvalidParameter(where, one, f"one of {', '.join(TYPES)}, or a list of some of them")


def _count(value: object, where: str) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_COUNT or value != int(value):  # type: ignore[operator,call-overload]
        raise InvalidParameter(where, value, "a whole number, 0 or more, of at most 63 bits")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if name.isidentifier() and len(name) <= 64 else f"{where}[{shown(name)}]"
