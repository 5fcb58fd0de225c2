"""From what a request says of its output's form to `StructuredOutputsParams`: OpenAI's `response_format`, vLLM's
`structured_outputs` and its older `guided_*` fields.

Owns their shapes and which may stand together. Does not own what a schema may say (`text/grammar`).
Invariant: a constraint is honoured to the letter or refused by name; two of them in one request are refused.
"""

from __future__ import annotations

import re
from typing import Any

from quire.core.errors import shown
from quire.core.structured import StructuredOutputsParams
from quire.serve.http.refusal import bad_request, unsupported
from quire.serve.openai.schema import JsonObject, SamplingFields

_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's fields before 0.12 → today's."""


def structured_outputs(body: SamplingFields) -> StructuredOutputsParams | None:
    """The constraint of a request, None if its output is free. Raises a 400 Refusal that names the field."""
    found = {
        "response_format": _of_format(body.response_format),
        "structured_outputs": body.structured_outputs,
        **{name: _of_guided(body, name) for name in _GUIDED},
    }
    given = [name for name, value in found.items() if value is not None]
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} both constrain the output: send one of them.", given[-1])
    if body.guided_whitespace_pattern is not None and "guided_json" not in given:
        raise bad_request("guided_whitespace_pattern is only allowed with guided_json.", "guided_whitespace_pattern")
    return found[given[0]] if given else None


def constraint_names(body: SamplingFields) -> dict[str, str]:
    """The engine's names of constraints → those that the request used, for errors. What is left is of tools."""
    if body.response_format is not None:
        schema = "response_format.json_schema.schema"
        return {"structured_outputs": "response_format", "structured_outputs.json": schema}
    for name, field in _GUIDED.items():
        if getattr(body, name) is not None:
            return {"structured_outputs": name, f"structured_outputs.{field}": name}
    if body.structured_outputs is not None:
        return {}
    return {"structured_outputs": "tools", "structured_outputs.calls": "tools"}


def _of_guided(body: SamplingFields, name: str) -> StructuredOutputsParams | None:
    value: Any = getattr(body, name)
    if value is None:
        return None
    pattern = body.guided_whitespace_pattern if name == "guided_json" else None
    return StructuredOutputsParams(**{_GUIDED[name]: value}, whitespace_pattern=pattern)


def _of_format(shape: JsonObject | None) -> StructuredOutputsParams | None:
    kind = None if shape is None else shape.get("type")
    if shape is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=shape)
    if kind != "json_schema":
        raise unsupported(
            "response_format.type", f"only text, json_object, json_schema and structural_tag are, not {shown(kind)}."
        )
    return StructuredOutputsParams(json=_schema_of(shape.get("json_schema")))


def _schema_of(form: object) -> JsonObject:
    where = "response_format.json_schema"
    if not isinstance(form, dict):
        raise bad_request(f"{where} must be an object with name and schema.", where)
    unknown = sorted(form.keys() - {"name", "description", "schema", "strict"})
    if unknown:
        raise bad_request(f"{where} has an unknown field {shown(unknown[0])}.", where, "unknown_parameter")
    name, schema, strict = form.get("name"), form.get("schema"), form.get("strict")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise bad_request(f"{where}.name = {shown(name)} must be 1 to 64 letters, digits, '_' or '-'.", f"{where}.name")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{where}.strict = {shown(strict)} must be true, false or null.", f"{where}.strict")
    if not isinstance(schema, dict):
        raise bad_request(f"{where}.schema must be a JSON schema: an object.", f"{where}.schema")
    return schema
