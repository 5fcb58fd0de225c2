"""A good body for each route that takes JSON, and what every error must look like in the dialect of its route."""

from __future__ import annotations

from typing import Any

import httpx

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON_HEADERS = {"content-type": "application/json"}


def valid(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    if path == TEXT:
        return {"model": "fake", "prompt": "x", "max_tokens": 2}
    return OTHER_BODIES[path]


OTHER_BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "fake", "input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "x"}]},
    "/v1/embeddings": {"model": "fake", "input": "x"},
    "/v1/score": {"model": "fake", "text_1": "x", "text_2": ["x", "y"]},
    "/score": {"model": "fake", "queries": "x", "documents": "y"},
    "/rerank": {"model": "fake", "query": "x", "documents": ["x", "y"]},
    "/v1/rerank": {"model": "fake", "query": "x", "documents": ["x", "y"]},
    "/v2/rerank": {"model": "fake", "query": "x", "documents": ["x", "y"]},
    "/pooling": {"model": "fake", "input": "x"},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2}},
    "/api/generate": {"model": "fake", "prompt": "x", "options": {"num_predict": 2}},
    "/api/embed": {"model": "fake", "input": "x"},
    "/api/embeddings": {"model": "fake", "prompt": "x"},
    "/api/show": {"model": "fake"},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": TEXT, "completion_window": "24h"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "folder"},
    "/v1/unload_lora_adapter": {"lora_name": "not there"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
"""A good body for every other route that takes JSON: a new route without one fails every test of the table."""


def is_anthropic(path: str) -> bool:
    return path.split("?")[0].startswith("/v1/messages")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def check_error(answer: httpx.Response, status: int | tuple[int, ...], param: str | None = None) -> dict[str, Any]:
    """The error body, exactly; never 422."""
    statuses = (status,) if isinstance(status, int) else status
    assert answer.status_code in statuses, f"{answer.status_code}: {answer.text[:300]}"
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    body = answer.json()
    if is_anthropic(answer.request.url.path):
        return check_anthropic_error(answer, body)
    if is_ollama(answer.request.url.path):
        assert set(body) == {"error"} and len(body["error"]) <= 700
        assert "Traceback" not in answer.text and "/srv" not in answer.text and " at 0x" not in answer.text
        return {"message": body["error"]}
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) <= 700
    assert "Traceback" not in answer.text and "/srv" not in answer.text and " at 0x" not in answer.text
    if param is not None:
        assert body["error"]["param"] is not None and body["error"]["param"].startswith(param), body
    return body["error"]


def check_anthropic_error(answer: httpx.Response, body: dict[str, Any]) -> dict[str, Any]:
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and len(body["error"]["message"]) <= 700
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == body["request_id"]
    assert "Traceback" not in answer.text and "/srv" not in answer.text and " at 0x" not in answer.text
    expected = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    expected |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    assert body["error"]["type"] == expected.get(answer.status_code, "invalid_request_error")
    return body["error"]
