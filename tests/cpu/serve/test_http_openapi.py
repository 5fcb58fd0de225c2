"""/openapi.json: it has every route, its references hold, and its bounds are those of the checks."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from quire.serve.app import ROUTES
from quire.serve.openapi import ANSWERS, BODIES, OTHER_MEDIA, document_of
from quire.serve.openapi_types import BOUNDS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DOCUMENT = document_of(ROUTES, ("fake",), needs_key=False)
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "x"}]},
    TEXT: {"model": "fake", "prompt": "x"},
}
NUMBERS = {name: bounds for name, bounds in BOUNDS.items() if bounds.keys() <= {"minimum", "maximum"}}


def test_it_is_served(server: Any) -> None:
    with server.client() as client:
        answer = client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["fake", "fake-alias"]
    assert "security" not in document


def test_a_key_is_said(make_server: Any) -> None:
    with make_server(api_key="secret-key-1").client() as client:
        answer = client.get("/openapi.json", headers={"authorization": "Bearer secret-key-1"})
    assert answer.json()["security"] == [{"key": []}] and "secret-key-1" not in answer.text


def test_every_route_is_in_it() -> None:
    paths = {(method, path.replace(":path}", "}")) for method, path, _ in ROUTES}
    assert {(method.upper(), path) for path, ops in DOCUMENT["paths"].items() for method in ops} == paths
    assert {path for _, path in paths} == ANSWERS.keys() | OTHER_MEDIA.keys()
    assert BODIES.keys() == {path for path, ops in DOCUMENT["paths"].items() if _takes_json(ops.get("post", {}))}


def _takes_json(operation: dict[str, Any]) -> bool:
    return "application/json" in operation.get("requestBody", {}).get("content", {})


def test_schemas_are_schemas_and_references_hold() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = re.findall(r"'#/components/schemas/(\w+)'", str(DOCUMENT))
    assert set(references) <= schemas.keys()


def test_null_may_stand_for_every_field_that_may_be_left_out() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for field in schema["properties"].keys() - {*schema.get("required", []), "type", "role"}:
            if not name.endswith("Error") and (name, field) != ("ResponsesTool", "name"):  # checked as a tool's name
                jsonschema.validate(None, {**schema["properties"][field], "components": DOCUMENT["components"]})


def test_every_bound_is_of_a_field() -> None:
    fields = {(name, field) for name, one in DOCUMENT["components"]["schemas"].items() for field in one["properties"]}
    for name in BOUNDS:
        owner, _, field = name.rpartition(".")
        assert any(owner in ("", one) and field == other for one, other in fields), name


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_numbers_have_the_bounds_of_the_checks(server: Any, path: str) -> None:
    """At a bound a value is taken, or refused for another reason than its range; beyond it, it is refused."""
    properties = DOCUMENT["components"]["schemas"][BODIES[path].__name__]["properties"]
    with server.client() as client:
        for field in properties.keys() & {name.rpartition(".")[2] for name in NUMBERS}:
            low, high = properties[field].get("minimum"), properties[field].get("maximum")
            for beyond in [*([] if low is None else [low - 1]), *([] if high is None else [high + 1])]:
                answer = client.post(path, json={**GOOD[path], field: beyond})
                assert answer.status_code == 400 and answer.json()["error"]["param"] == field, (field, beyond)
            if low is not None and field not in ("max_tokens", "best_of", "top_logprobs"):
                answer = client.post(path, json={"max_tokens": 1, **GOOD[path], field: low})
                assert answer.status_code == 200, (field, answer.text)
