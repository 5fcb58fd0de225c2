"""/openapi.json: it has every route, its references hold, and its bounds are those of the checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from msgspec import inspect

from quire.serve.app import ROUTES
from quire.serve.ops.openapi import ANSWERS, BODIES, OTHER_MEDIA, REFUSED, document_of
from quire.serve.ops.openapi_types import BOUNDS, ITEMS

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
    assert set(references) == schemas.keys(), "a component to which nothing refers says nothing"


def test_null_may_stand_for_every_field_that_may_be_left_out() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        for field in schema["properties"].keys() - {*schema.get("required", []), "type", "role"}:
            checked_later = {"ResponsesTool.name", "MessagesTool.name", "Tool.function"}
            if not name.endswith("Error") and f"{name}.{field}" not in checked_later:
                jsonschema.validate(None, {**schema["properties"][field], "components": DOCUMENT["components"]})


CONST = {"MessageParam.role": "user", "ToolChoice.type": "auto", "Tool.type": "function",
         "ResponsesTool.type": "function", "BatchRequest.endpoint": TEXT, "BatchRequest.completion_window": "24h",
         "MessageItem.role": "user", "CallItem.type": "function_call", "CallOutputItem.type": "function_call_output",
         "ReasoningItem.type": "reasoning"}  # fmt: skip


def least(kind: inspect.Type, name: str = "") -> Any:
    """A small good value of a type. name: `Type.field` where it stands."""
    match kind:
        case inspect.StructType():
            tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
            owner = kind.cls.__name__
            return tag | {one.name: least(one.type, f"{owner}.{one.name}") for one in kind.fields if one.required}
        case inspect.ListType():
            return [least(kind.item_type)]
        case inspect.UnionType():
            return least(kind.types[0], name)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.RawType():
            return {}
        case inspect.IntType():
            return 1
    return CONST.get(name, "fake")


def nulls(kind: inspect.Type, wrap: Callable[[Any], Any] = lambda value: value) -> Iterator[tuple[str, Any]]:
    """(`Type.field`, body with null there and little else) for every field, however deep. wrap: puts it there."""
    match kind:
        case inspect.ListType():
            yield from nulls(kind.item_type, lambda value: wrap([value]))
        case inspect.UnionType():
            for one in kind.types:
                yield from nulls(one, wrap)
        case inspect.StructType():
            for field in kind.fields:
                yield f"{kind.cls.__name__}.{field.name}", wrap({**least(kind), field.name: None})
                yield from nulls(field.type, lambda value, name=field.name: wrap({**least(kind), name: value}))


@pytest.mark.parametrize("taken", [*BODIES.values(), *ITEMS])
def test_null_is_in_the_document_where_the_types_take_it(taken: Any) -> None:
    kind = inspect.type_info(taken)
    found = {"$ref": f"#/components/schemas/{taken.__name__}", "components": DOCUMENT["components"]}
    schema = jsonschema.Draft202012Validator(found)
    assert schema.is_valid(least(kind)), [error.message for error in schema.iter_errors(least(kind))]
    for name, body in nulls(kind):
        if name in ("ToolUseBlock.input", "FunctionTool.parameters", "MessagesTool.input_schema"):
            continue  # bytes that are looked at later
        try:
            msgspec.json.decode(msgspec.json.encode(body), type=taken)
        except msgspec.ValidationError:
            assert not schema.is_valid(body), name
        else:
            assert schema.is_valid(body), (name, [error.message for error in schema.iter_errors(body)])


@pytest.mark.parametrize("path", REFUSED)
def test_no_ops_in_the_document_are_taken(server: Any, path: str) -> None:
    """Each value that the document lists for a field that is not honoured is taken, others are refused by name."""
    body = GOOD[TEXT] if path == TEXT else GOOD[CHAT]
    if path in ("/v1/embeddings", "/v1/responses"):
        body = {"model": "fake", "input": "x"}
    body = {**body, "max_tokens": 1} if path in (CHAT, TEXT, "/v1/messages") else body
    properties = DOCUMENT["components"]["schemas"][BODIES[path].__name__]["properties"]
    fields = {name: one for name, one in properties.items() if "Not supported" in one.get("description", "")}
    assert fields
    with server.client() as client:
        every = {name: [one for one in field["enum"] if one is not None][-1] for name, field in fields.items()}
        answer = client.post(path, json=body | every)
        assert answer.status_code == 200, answer.text
        for name in fields:
            error = client.post(path, json={**body, name: "asks for something"}).json()
            assert name in (error["error"].get("param") or error["error"]["message"]), name


def test_a_strict_server_says_so() -> None:
    strict = document_of(ROUTES, ("fake",), needs_key=False, is_strict=True)["components"]["schemas"]
    loose = DOCUMENT["components"]["schemas"]
    assert (loose["ChatRequest"]["additionalProperties"], strict["ChatRequest"]["additionalProperties"]) == (
        True,
        False,
    )
    assert "store" in loose["ChatRequest"]["properties"] and "store" not in strict["ChatRequest"]["properties"]


def test_a_choice_of_tools_is_of_its_own_api() -> None:
    good = {
        "ChatRequest": ["auto", {"type": "function", "function": {"name": "f"}}],
        "ResponsesRequest": ["auto", {"type": "function", "name": "f"}],
        "MessagesRequest": [{"type": "auto"}, {"type": "tool", "name": "f"}],
        "CountTokensRequest": [{"type": "any", "disable_parallel_tool_use": True}],
    }
    bad = {name: [5, "any", []] for name in ("ChatRequest", "ResponsesRequest")}
    bad |= {name: ["auto", {"nonsense": 1}, {"type": "required"}] for name in ("MessagesRequest", "CountTokensRequest")}
    for name, values in good.items():
        property_schema = DOCUMENT["components"]["schemas"][name]["properties"]["tool_choice"]
        schema = jsonschema.Draft202012Validator({**property_schema, "components": DOCUMENT["components"]})
        assert all(schema.is_valid(value) for value in [None, *values]), name
        assert not any(schema.is_valid(value) for value in bad[name]), name


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
