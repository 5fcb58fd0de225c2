"""JSON schemas in the style of the public JSON-Schema-Test-Suite, chosen and written for constrained output: each is
supported, has an instance that ends, and says something that text without constraint would often miss."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STR, NUM, BOOL, NULL = ({"type": kind} for kind in ("string", "number", "boolean", "null"))
INT: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
"""A small model would write digits for ever."""
SHORT: Schema = {"type": "string", "maxLength": 8}


def obj(required: list[str] | None = None, /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": list(properties) if required is None else required,
    }


def arr(items: Schema, low: int = 0, high: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _numbers() -> list[Schema]:
    """minimum, maximum, exclusive ones, multipleOf."""
    found: list[Schema] = []
    for kind in ("integer", "number"):
        for low, high in ((0, 9), (-5, 5), (10, 12), (-20, -10), (100, 1000), (0, 0), (7, 7), (-1, 1)):
            found.append({"type": kind, "minimum": low, "maximum": high})
        found.append({"type": kind, "exclusiveMinimum": 0, "exclusiveMaximum": 10})
        found.append({"type": kind, "minimum": 3, "exclusiveMaximum": 5})
        found.append({"type": kind, "exclusiveMinimum": -3, "maximum": -1})
    found += [{"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": n} for n in (2, 3, 5, 10)]
    found += [{"type": "number", "minimum": 0.5, "maximum": 1.5}, {"type": "number", "minimum": -0.25, "maximum": 0.25}]
    return found


def _strings() -> list[Schema]:
    """minLength, maxLength, pattern, format, escapes."""
    found: list[Schema] = [
        {"type": "string", "minLength": a, "maxLength": b} for a, b in ((0, 0), (1, 1), (0, 3), (2, 5), (5, 9))
    ]
    patterns = [
        "^[a-z]+$",
        "^[A-Z]{3}$",
        "^\\d{3}-\\d{4}$",
        "^(yes|no|maybe)$",
        "^a*b$",
        "^[^ ]{1,6}$",
        "^\\w{2,4}$",
        "^#[0-9a-f]{6}$",
        "^v\\d+\\.\\d+$",
        "^[A-Za-z]+@[a-z]+\\.com$",
        "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$",
        "^x?y?z?$",
        '^["\\\\]{2}$',
        "^é+$",
        "^[а-я]{2}$",
        "^.{3}$",
        "^(foo|bar){2}$",
        "^\\S\\s\\S$",
        "^[1-9][0-9]?$",
        "^$|^ok$",
    ]
    found += [{"type": "string", "pattern": pattern, "maxLength": 24} for pattern in patterns]
    found += [
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")
    ]
    return found


def _constants() -> list[Schema]:
    """enum and const of every type."""
    values: list[Any] = [
        "a",
        "",
        "two words",
        'quo"te',
        "back\\slash",
        "line\nbreak",
        "tab\t",
        "é",
        "日本",
        "😀",
        "/",
        "\u007f",
        0,
        -1,
        42,
        1.5,
        True,
        False,
        None,
        [],
        [1],
        [1, "a", None],
        {},
        {"a": 1},
        {"a": {"b": [True]}},
        [[]],
        {"": 0},
        "<tool_call>",
    ]
    found: list[Schema] = [{"const": value} for value in values]
    found += [{"enum": values[i : i + 3]} for i in range(0, len(values) - 2, 2)]
    return found


def _arrays() -> list[Schema]:
    """items, prefixItems, minItems, maxItems, nesting."""
    found = [
        arr(one, low, high)
        for one in (INT, BOOL, NULL, SHORT)
        for low, high in ((0, 0), (0, 2), (1, 1), (2, 4), (3, 3))
    ]
    found += [
        {"type": "array", "prefixItems": [INT, SHORT], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [BOOL, BOOL, BOOL], "items": False, "minItems": 3},
        {"type": "array", "prefixItems": [INT], "items": SHORT, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [{"const": "head"}], "items": INT, "minItems": 2, "maxItems": 4},
        arr(arr(INT, 1, 2), 1, 2),
        arr(arr(arr(BOOL, 1, 1), 1, 1), 1, 1),
        arr(obj(a=INT), 1, 2),
        arr({"type": ["integer", "null"]}, 1, 3),
        arr({"enum": ["x", 1, None]}, 2, 2),
    ]
    return found


def _objects() -> list[Schema]:
    """properties, required, additionalProperties, nesting, odd keys."""
    found = [
        obj(),
        obj(a=INT),
        obj(a=INT, b=BOOL, c=NULL),
        obj([], a=INT),
        obj(["b"], a=INT, b=INT),
        obj(name=SHORT, age=INT),
        obj(a=obj(b=obj(c=BOOL))),
        obj(items=arr(SHORT, 1, 2), n=INT),
        obj([], a=INT, b=SHORT, c=BOOL, d=NULL),
        obj(id={"type": "string", "format": "uuid"}),
        obj(when={"type": "string", "format": "date"}),
        obj(kind={"const": "circle"}, r={"type": "integer", "minimum": 1, "maximum": 99}),
        {"type": "object", "properties": {"two words": INT}, "required": ["two words"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {'quo"te': INT, "é": BOOL, "": NULL},
            "required": ['quo"te', "é", ""],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"a": {}},
            "required": ["a"],
            "additionalProperties": False,
            "maxProperties": 1,
        },
        {
            "type": "object",
            "properties": {"a": INT},
            "required": ["a"],
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 2,
        },
        {
            "type": "object",
            "properties": {"__proto__": INT, "constructor": BOOL},
            "required": ["__proto__", "constructor"],
            "additionalProperties": False,
        },
    ]
    for one in (STR, INT, NUM, BOOL, NULL):
        kind = (
            {**one, "maxLength": 6} if one is STR else {**one, "minimum": 0, "maximum": 9} if one in (INT, NUM) else one
        )
        found += [obj(value=kind), obj(first=kind, second=kind), obj(inner=obj(value=kind), more=arr(kind, 1, 2))]
    return found


def _unions() -> list[Schema]:
    """anyOf, oneOf, allOf, type lists, $ref and $defs, recursion."""
    point = {"$defs": {"point": obj(x=INT, y=INT)}}
    node: Schema = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"enum": [0, 1]}, "next": {"anyOf": [NULL, {"$ref": "#/$defs/node"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    found: list[Schema] = [
        {"anyOf": [INT, BOOL]},
        {"anyOf": [SHORT, NULL]},
        {"anyOf": [obj(a=INT), obj(b=BOOL)]},
        {"anyOf": [arr(INT, 1, 1), NULL]},
        {"anyOf": [{"const": 1}, {"const": "one"}]},
        {"oneOf": [{"const": "a"}, {"const": "b"}]},
        {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, NULL]},
        {"oneOf": [obj(kind={"const": "a"}, n=BOOL), obj(kind={"const": "b"}, s=NULL)]},
        {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]},
        {"allOf": [{"type": "string", "maxLength": 4}, {"minLength": 2}]},
        {
            "allOf": [
                {"type": "object", "properties": {"a": BOOL}, "required": ["a"]},
                {"type": "object", "properties": {"b": NULL}, "required": ["b"]},
            ],
            "type": "object",
            "maxProperties": 2,
        },
        {"type": ["integer", "null"]},
        {"type": ["boolean", "null"]},
        {"type": ["boolean", "integer"], "minimum": 0, "maximum": 3},
        {**point, "$ref": "#/$defs/point"},
        {**point, **arr({"$ref": "#/$defs/point"}, 1, 2)},
        {**point, **obj(a={"$ref": "#/$defs/point"}, b={"$ref": "#/$defs/point"})},
        {"definitions": {"flag": BOOL}, **obj(on={"$ref": "#/definitions/flag"})},
        node,
        obj(value={"anyOf": [INT, SHORT, NULL]}),
        obj(either={"anyOf": [obj(a=BOOL), arr(BOOL, 1, 1)]}),
        obj([], tag={"enum": ["x", "y"]}, value={"type": ["integer", "null"]}),
        {
            "$comment": "annotations mean nothing",
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [2],
            "deprecated": True,
            "readOnly": True,
            **BOOL,
        },
    ]
    return found


def _wrapped() -> list[Schema]:
    """Leaves in optional properties, in unions with null, in pairs."""
    leaves: list[Schema] = [
        {"type": "integer", "minimum": 1, "maximum": 12},
        {"enum": ["north", "south"]},
        {"const": [1, {"a": None}]},
        SHORT,
        {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"},
        {"type": "string", "format": "date"},
        BOOL,
        arr(INT, 1, 2),
        {"type": "number", "minimum": 0, "maximum": 1},
    ]
    found = [obj(["must"], must=leaf, may=leaf) for leaf in leaves]
    found += [obj(value={"anyOf": [leaf, NULL]}) for leaf in leaves]
    found += [{"type": "array", "prefixItems": [leaf, leaf], "items": False, "minItems": 2} for leaf in leaves]
    return found


def _records() -> list[Schema]:
    """What programs ask models for: small records of closed fields."""
    level, day = {"enum": ["low", "medium", "high"]}, {"type": "string", "pattern": "^(mon|tue|wed)$"}
    share: Schema = {"type": "number", "enum": [0, 0.25, 0.5, 1]}
    return [
        obj(ok=BOOL),
        obj(ok=BOOL, reason=SHORT),
        obj(label={"enum": ["spam", "ham"]}),
        obj(label={"enum": ["spam", "ham"]}, confidence=share),
        obj(day=day, urgency=level),
        obj(days=arr(day, 1, 2)),
        obj(id=INT, level={"anyOf": [level, NULL]}),
        obj(verdict={"const": "pass"}, score={"type": "integer", "minimum": 1, "maximum": 5}),
        obj(range={"type": "array", "prefixItems": [INT, INT], "items": False, "minItems": 2}),
        obj(["action"], action={"enum": ["open", "close"]}, target=SHORT),
        {"anyOf": [obj(kind={"const": "number"}, value=INT), obj(kind={"const": "text"}, value=SHORT)]},
        arr(obj(id=INT), 1, 2),
    ]


CASES: list[Schema] = [
    *_numbers(),
    *_strings(),
    *_constants(),
    *_arrays(),
    *_objects(),
    *_unions(),
    *_wrapped(),
    *_records(),
]
