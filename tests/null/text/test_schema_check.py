"""Mistakes in JSON schemas are told with their place, their value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import RequestError
from quire.core.failure import Code
from quire.core.structured import StructuredOutputsParams
from quire.serve.http.refusal import refusal_of
from quire.text.grammar import grammar_of
from quire.text.schema_check import checked_schema

FIELD = "response_format.json_schema.schema"
TYPES = "one of string, number, integer, boolean, object, array, null, or a list of some of them."
COUNT = "a whole number, 0 or more, of at most 63 bits."


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, f".type = 'objekt' is not allowed: it must be {TYPES}"),
        ({"type": ["string", "x"]}, f".type = 'x' is not allowed: it must be {TYPES}"),
        ({"properties": {"a": {"type": 5}}}, f".properties.a.type = 5 is not allowed: it must be {TYPES}"),
        ({"properties": {"a b": {"type": 5}}}, f".properties['a b'].type = 5 is not allowed: it must be {TYPES}"),
        (
            {"anyOf": [{}, {"items": {"minItems": -1}}]},
            f".anyOf[1].items.minItems = -1 is not allowed: it must be {COUNT}",
        ),
        ({"minLength": 1.5}, f".minLength = 1.5 is not allowed: it must be {COUNT}"),
        ({"minLength": True}, f".minLength = True is not allowed: it must be {COUNT}"),
        ({"maxLength": float("inf")}, f".maxLength = inf is not allowed: it must be {COUNT}"),
        ({"maxLength": 1e30}, f".maxLength = 1e+30 is not allowed: it must be {COUNT}"),
    ],
)
def test_a_mistake_is_told_with_its_place(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(StructuredOutputsParams(json=schema))
    assert caught.value.code == Code.INVALID_GRAMMAR
    assert (caught.value.message, caught.value.param) == (f"structured_outputs.json{said}", "structured_outputs.json")
    refusal = refusal_of(caught.value, {"structured_outputs.json": FIELD})
    assert (refusal.message, refusal.param) == (f"{FIELD}{said}", FIELD)


def test_whole_floats_are_counts_and_values_are_left_alone() -> None:
    """What stands in `const`, `enum` and `default` is no schema; neither is a property that is called `type`."""
    schema = {"type": "string", "minLength": 1e9, "maxLength": 0.0, "default": {"type": "objekt", "minLength": 1.5}}
    outer = {"properties": {"type": schema}, "enum": [{"type": 1}], "const": {"minItems": "x"}, "items": True}
    found = checked_schema(outer, "schema")
    inner = found["properties"]["type"]
    assert repr(inner["minLength"]) == "1000000000" and repr(inner["maxLength"]) == "0"
    assert found == outer and isinstance(schema["minLength"], float)
