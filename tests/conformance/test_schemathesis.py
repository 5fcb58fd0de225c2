"""schemathesis, with good and with bad data, by OpenAI's document and by the server's own: no 5xx, no hang, and every
error in the shape that clients know."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

TIME_LIMIT_S = 70
"""Longer than --request-timeout: whoever waits this long waits for ever."""
OPENAI_PATHS = {"/chat/completions", "/completions", "/models", "/models/{model}"}
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATHS = "/api/"
GENERATING = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"}
TEXT = {"type": "string", "minLength": 1, "maxLength": 60}
ANSWERED = {
    "prompt": TEXT,
    "input": TEXT,
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"role": {"const": "user"}, "content": TEXT},
            "required": ["role", "content"],
            "additionalProperties": False,
        },
    },
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
}
"""Fields that decide whether there is anything to answer."""
PLAIN_FIELDS = {
    "model", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "bad_words", "logit_bias", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "add_special_tokens", "return_tokens_as_token_ids", "stream", "user",
    "metadata", "service_tier", "echo", "return_token_ids", "stop_sequences", "instructions", "system",
    "encoding_format", "pooling", "normalize", "tools", "parallel_tool_calls", "cache_salt",
}  # fmt: skip
"""Fields that depend on no other."""
OWN_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPENAI_CHECKS = [not_a_server_error, response_schema_conformance]
REQUEST_ID = re.compile(r"req_[0-9a-f]{24}")
Tally = collections.Counter[tuple[str, int]]


OWN_ANSWERED = "schemathesis, own document, positive, to be answered"
OPENAI_ANSWERED = "schemathesis, OpenAI's document, positive, to be answered"
MIN_ANSWERED = 1 / 4
"""Least share of 200s on each path where much of what is made can be answered; 0.37 to 0.95 was seen."""

Document = dict[str, Any]


def made(document: Document, base: str, mode: str, config: pytest.Config) -> Any:
    """What schemathesis asks by a document, the same in every run."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base)
    schema.config.max_stream_events = 100_000  # 20 otherwise, and then the end is not seen
    n_examples = config.getoption("--examples")
    schema.config.generation.update(modes=[mode], max_examples=n_examples, deterministic=True, database="none")
    return schema


@pytest.fixture
def openai_document(request: pytest.FixtureRequest) -> Document:
    path = request.config.getoption("--openai-schema")
    if not path:
        pytest.skip("give OpenAI's document with --openai-schema or OPENAI_SCHEMA")
    document: Document = json.loads(Path(path).read_text())
    document["paths"] = {path: found for path, found in document["paths"].items() if path in OPENAI_PATHS}
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"]["200"]["content"].pop("text/event-stream", None)  # it means the data of events
    return document


@pytest.fixture
def openai_negative(openai_document: Document, server: Any, pytestconfig: pytest.Config) -> Any:
    return made(openai_document, server.base + "/v1", "negative", pytestconfig)


@pytest.fixture
def openai_positive(openai_document: Document, server: Any, pytestconfig: pytest.Config) -> Any:
    return made(openai_document, server.base + "/v1", "positive", pytestconfig)


@pytest.fixture
def own_negative(server: Any, pytestconfig: pytest.Config) -> Any:
    document = server.ask("/openapi.json")
    for path, methods in list(document["paths"].items()):
        kept = {method: found for method, found in methods.items() if can_be_bad(found)}
        document["paths"][path] = kept
    return made(document, server.base, "negative", pytestconfig)


@pytest.fixture
def own_positive(server: Any, pytestconfig: pytest.Config) -> Any:
    return made(server.ask("/openapi.json"), server.base, "positive", pytestconfig)


@pytest.fixture
def own_answered(server: Any, pytestconfig: pytest.Config) -> Any:
    document = server.ask("/openapi.json")
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "EmbeddingRequest"):
        narrow(document["components"]["schemas"][name])
    document["paths"] = {path: found for path, found in document["paths"].items() if path in GENERATING}
    return made(document, server.base, "positive", pytestconfig)


@pytest.fixture
def openai_answered(openai_document: Document, server: Any, pytestconfig: pytest.Config) -> Any:
    """The same, with answers judged by OpenAI's document."""
    own = server.ask("/openapi.json")["components"]["schemas"]
    names = {"/chat/completions": "ChatRequest", "/completions": "CompletionRequest"}
    openai_document["paths"] = {path: openai_document["paths"][path] for path in names}
    for path, name in names.items():
        narrow(own[name])
        own[name]["properties"].pop("tools", None)  # the only reference to other schemas
        openai_document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] = own[name]
    return made(openai_document, server.base + "/v1", "positive", pytestconfig)


def narrow(schema: Document) -> None:
    """Leave out what depends on other fields, so that most of what is made gets to the model and is answered."""
    properties = schema["properties"]
    refused = {field for field, kind in properties.items() if kind.get("description", "").startswith("Not supported")}
    for field in refused | (properties.keys() - ANSWERED.keys() - PLAIN_FIELDS):
        del properties[field]
    properties.update({field: kind for field, kind in ANSWERED.items() if field in properties})
    schema["additionalProperties"] = False
    schema["required"] = sorted(properties.keys() & {"model", *ANSWERED})


def can_be_bad(operation: Document) -> bool:
    """False where nothing can be sent but a path, of which any text is a good part."""
    return "requestBody" in operation or any(one["in"] == "query" for one in operation.get("parameters", []))


def check(case: Any, checks: list[Any], what: str, tally: Tally) -> Any:
    """Send what was made; the answer, if it passes."""
    answer = case.call(timeout=TIME_LIMIT_S)
    tally[what, answer.status_code] += 1
    check_shape(answer, case.path)
    if case.path.startswith(OLLAMA_PATHS) and asks_for_nothing(answer):
        checks = [one for one in checks if one is not negative_data_rejection]
    case.validate_response(answer, checks=checks)
    return answer


def asks_for_nothing(answer: Any) -> bool:
    """Ollama's way to load a model: no prompt, and nothing else in the body matters."""
    if answer.status_code != 200 or not answer.headers["content-type"][0].startswith("application/json"):
        return False
    body = json.loads(answer.content)
    return body.get("done_reason") == "load" or [] in (body.get("embeddings"), body.get("embedding"))


def check_shape(answer: Any, path: str) -> None:
    """An id on every answer; an error is JSON of OpenAI's shape, or of Anthropic's or Ollama's on their paths."""
    headers = {name.lower(): value for name, value in answer.headers.items()}
    assert REQUEST_ID.fullmatch(headers["x-request-id"][0]), headers
    assert answer.status_code not in (422, *range(500, 600)), answer.content[:500]
    if answer.status_code >= 400:
        check_error(json.loads(answer.content), path)
    elif headers["content-type"][0].startswith("text/event-stream"):
        check_stream(answer.content.decode(), path)


def check_error(body: dict[str, Any], path: str) -> None:
    if path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/"):
        assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error", body
        assert body["error"].keys() - {"details"} == {"type", "message"} and all(body["error"].values()), body
        assert REQUEST_ID.fullmatch(body["request_id"]), body
        return
    assert body.keys() == {"error"}, body
    error = body["error"]
    if path.startswith(OLLAMA_PATHS):
        assert error and isinstance(error, str)
        return
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str) and isinstance(error["type"], str)
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))


def nullable(schema: Any) -> Any:
    """The same schema with `nullable`, which is of an older OpenAPI, said as JSON schema says it."""
    if isinstance(schema, list):
        return [nullable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: nullable(one) for name, one in schema.items()}
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def check_stream(text: str, path: str) -> None:
    """Every event is JSON; the last says that it is the last, or what went wrong."""
    events = events_of(text)
    values = [json.loads(event) for event in events if event != "[DONE]"]
    if values[-1].get("error"):
        is_response = path.endswith("/responses")  # its error stands beside other fields of the event
        check_error({"error": values[-1]["error"]} if is_response else values[-1], path)
    else:
        kind = values[-1].get("type", "")
        assert events[-1] == "[DONE]" or kind in ("message_stop", "response.completed", "response.incomplete"), text


SETTINGS = hypothesis.settings(
    deadline=None, suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=True
)


@schemathesis.pytest.from_fixture("openai_negative").parametrize()
@SETTINGS
def test_openai_negative(case: Any, tally: Tally) -> None:
    check(case, OPENAI_CHECKS, "schemathesis, OpenAI's document, negative", tally)


@schemathesis.pytest.from_fixture("openai_positive").parametrize()
@SETTINGS
def test_openai_positive(case: Any, tally: Tally) -> None:
    check(case, OPENAI_CHECKS, "schemathesis, OpenAI's document, positive", tally)


@schemathesis.pytest.from_fixture("openai_answered").parametrize()
@SETTINGS
def test_openai_answered(case: Any, tally: Tally, openai_document: Document) -> None:
    answer = check(case, OPENAI_CHECKS, f"{OPENAI_ANSWERED}: {case.path}", tally)
    is_stream = answer.headers["content-type"][0].startswith("text/event-stream")
    if is_stream and case.path == "/chat/completions":  # the document has no words for chunks of /completions
        name, components = "CreateChatCompletionStreamResponse", nullable(openai_document["components"])
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        for event in events_of(answer.content.decode())[:-1]:
            jsonschema.validate(json.loads(event), schema, jsonschema.Draft202012Validator)


@schemathesis.pytest.from_fixture("own_negative").parametrize()
@SETTINGS
def test_own_negative(case: Any, tally: Tally) -> None:
    check(case, OWN_CHECKS, "schemathesis, own document, negative", tally)


@schemathesis.pytest.from_fixture("own_positive").parametrize()
@SETTINGS
def test_own_positive(case: Any, tally: Tally) -> None:
    check(case, OWN_CHECKS, "schemathesis, own document, positive", tally)


@schemathesis.pytest.from_fixture("own_answered").parametrize()
@SETTINGS
def test_own_answered(case: Any, tally: Tally) -> None:
    check(case, OWN_CHECKS, f"{OWN_ANSWERED}: {case.path}", tally)


RUNS = [(OPENAI_ANSWERED, path) for path in ("/chat/completions", "/completions")]
RUNS += [(OWN_ANSWERED, path) for path in sorted(GENERATING)]


@pytest.mark.parametrize(("what", "path"), RUNS)
def test_enough_is_answered(what: str, path: str, tally: Tally, pytestconfig: pytest.Config) -> None:
    """Of what the tests above asked: a server that refuses everything passes them."""
    if what == OPENAI_ANSWERED and not pytestconfig.getoption("--openai-schema"):
        pytest.skip("give OpenAI's document with --openai-schema or OPENAI_SCHEMA")
    n_by_status = {status: n for (other, status), n in tally.items() if other == f"{what}: {path}"}
    assert n_by_status.get(200, 0) > MIN_ANSWERED * sum(n_by_status.values()), n_by_status


def test_an_error_must_have_the_shape_of_its_path() -> None:
    openai = {"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}}
    error = {"type": "invalid_request_error", "message": "No."}
    anthropic = {"type": "error", "error": error, "request_id": "req_" + "0" * 24}
    for path in ("/chat/completions", "/v1/responses", "/v1/messages_of_others"):
        check_error(openai, path)
        with pytest.raises(AssertionError):
            check_error(anthropic, path)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        check_error(anthropic, path)
        with pytest.raises(AssertionError):
            check_error(openai, path)
