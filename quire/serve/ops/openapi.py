"""GET /openapi.json: the API as an OpenAPI 3.1 document, made from the route table and the types of the bodies.

Owns which route takes and gives what. Does not own routes (`app.py`) nor types (`openapi_types.py`).
Invariant: every route is in it, and every answer with an error has the shape that it says.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire import __version__
from quire.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from quire.serve.batch.batches import BatchRequest
from quire.serve.http.dialect import THREAD_NOT_FOUND, dialect_of
from quire.serve.http.exchange import Exchange
from quire.serve.http.unknown_fields import Refused
from quire.serve.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quire.serve.openai.refused_fields import EMBEDDING, GENERATING, PROMPTING
from quire.serve.openai.responses_schema import ResponsesRequest
from quire.serve.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    JsonObject,
    TokenizeRequest,
)
from quire.serve.openai.scoring_schema import PoolingRequest, RerankRequest, ScoreRequest
from quire.serve.ops.adapters import LoadBody, UnloadBody
from quire.serve.ops.openapi_types import TypeSchemas
from quire.serve.state import ServerState

Route = tuple[str, str, Any]

BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/pooling": PoolingRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
    "/v1/batches": BatchRequest,
    "/v1/load_lora_adapter": LoadBody,
    "/v1/unload_lora_adapter": UnloadBody,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""Path → type of the JSON that is posted there."""

REFUSED: dict[str, Refused] = {
    "/v1/chat/completions": GENERATING,
    "/v1/completions": GENERATING,
    "/v1/embeddings": EMBEDDING,
    "/v1/responses": GENERATING,
    "/v1/messages": GENERATING,
    "/v1/messages/count_tokens": PROMPTING,
    "/tokenize": PROMPTING,
}
"""Path → fields that are refused there unless they ask for nothing."""

ANSWERS: dict[str, str] = {
    "/health": "status",
    "/ping": "status",
    "/load": "server_load",
    "/reset_prefix_cache": "success",
    "/sleep": "is_sleeping",
    "/wake_up": "is_sleeping",
    "/is_sleeping": "is_sleeping",
    "/v1/score": "id object created model data usage",
    "/score": "id object created model data usage",
    "/rerank": "id model usage results",
    "/v1/rerank": "id model usage results",
    "/v2/rerank": "id model usage results",
    "/pooling": "id object created model data usage",
    "/version": "version",
    "/v1/models": "object data",
    "/v1/models/{model}": "id object created owned_by max_model_len",
    "/v1/engine": "model version healthy engine stats",
    "/v1/load": "healthy num_requests_running num_requests_waiting kv_cache_usage_perc tokens_per_second",
    "/v1/requests/{request_id}/explain": "id object parts",
    "/v1/chat/completions": "id object created model choices usage",
    "/v1/completions": "id object created model choices usage",
    "/v1/embeddings": "object model data usage",
    "/v1/responses": "id object created_at status model output usage",
    "/v1/messages": "id type role model content stop_reason usage",
    "/v1/messages/count_tokens": "input_tokens",
    "/api/chat": "model created_at message done",
    "/api/generate": "model created_at response done",
    "/api/embed": "model embeddings",
    "/api/embeddings": "embedding",
    "/api/show": "details model_info capabilities",
    "/api/tags": "models",
    "/api/ps": "models",
    "/api/version": "version",
    "/v1/files": "object",
    "/v1/files/{file_id}": "id object",
    "/v1/batches": "object",
    "/v1/batches/{batch_id}": "id object endpoint status",
    "/v1/batches/{batch_id}/cancel": "id object endpoint status",
    "/tokenize": "count max_model_len tokens",
    "/detokenize": "prompt",
    "/openapi.json": "openapi info paths",
}
"""Path → fields that the JSON of a good answer always has."""

OTHER_MEDIA = {
    "/metrics": "text/plain",
    "/v1/files/{file_id}/content": "application/jsonl",
    "/v1/load_lora_adapter": "text/plain",
    "/v1/unload_lora_adapter": "text/plain",
}
STREAMING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"}
)

_STRING: JsonObject = {"type": "string"}
_LIMIT: JsonObject = {"type": "integer", "minimum": 1}
_QUERIES: dict[str, dict[str, JsonObject]] = {
    "/v1/files": {"purpose": _STRING, "limit": {**_LIMIT, "maximum": 10_000}, "after": _STRING},
    "/v1/batches": {"limit": {**_LIMIT, "maximum": 100}, "after": _STRING},
}
_FORM: JsonObject = {
    "type": "object",
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}
_NULLABLE: JsonObject = {"type": ["string", "null"]}
_DETAILS: JsonObject = {
    "type": "object",
    "properties": {"error_code": {"const": THREAD_NOT_FOUND}},
    "required": ["error_code"],
    "additionalProperties": False,
}
ERRORS: dict[str, JsonObject] = {
    "Error": {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {"message": _STRING, "type": _STRING, "param": _NULLABLE, "code": _NULLABLE},
                "required": ["message", "type", "param", "code"],
                "additionalProperties": False,
            }
        },
        "required": ["error"],
        "additionalProperties": False,
    },
    "AnthropicError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "properties": {"type": _STRING, "message": _STRING, "details": _DETAILS},
                "required": ["type", "message"],
                "additionalProperties": False,
            },
            "request_id": _STRING,
        },
        "required": ["type", "error", "request_id"],
        "additionalProperties": False,
    },
    "OllamaError": {
        "type": "object",
        "properties": {"error": _STRING},
        "required": ["error"],
        "additionalProperties": False,
    },
}


class ApiDocument:
    """The API of this server as an OpenAPI document. routes: the server's table, this endpoint included."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes

    async def __call__(self, state: ServerState, exchange: Exchange) -> None:
        """Answer with the document, which names the loaded model."""
        arguments = tuple(self._routes), state.limits.model_names, not state.keys.is_open
        served = state.config.strict, state.config.root_path
        body = await asyncio.to_thread(_encoded, *arguments, *served)  # the first time takes some 20 ms
        await exchange.respond(200, body)


@functools.lru_cache(maxsize=4)
def _encoded(
    routes: tuple[Route, ...], model_names: tuple[str, ...], needs_key: bool, is_strict: bool, root_path: str
) -> bytes:
    return msgspec.json.encode(
        document_of(routes, model_names, needs_key=needs_key, is_strict=is_strict, root_path=root_path)
    )


def document_of(
    routes: Sequence[Route],
    model_names: tuple[str, ...],
    *,
    needs_key: bool,
    is_strict: bool = False,
    root_path: str = "",
) -> JsonObject:
    """The document for (method, path, handler) routes; a handler's docstring begins with what the route does."""
    types = TypeSchemas(model_names, is_strict=is_strict)
    paths: dict[str, JsonObject] = {}
    for method, pattern, handler in routes:
        path = pattern.replace(":path}", "}")
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, handler, types)
    form = paths["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]
    form["schema"] = {**_FORM, "additionalProperties": not is_strict}
    if not is_strict:
        for path, refused in REFUSED.items():
            _add_refused(types.components[BODIES[path].__name__]["properties"], refused)
    components: JsonObject = {"schemas": ERRORS | types.components}
    document: JsonObject = {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for probe in (paths["/health"]["get"], paths["/ping"]["get"], paths["/ping"]["post"]):
            probe["security"] = []
    return document


def _add_refused(properties: JsonObject, refused: Refused) -> None:
    """Fields that are not honoured, with the values that ask for nothing, where these can be listed."""
    for name, field in refused.items():
        if "." not in name and name not in properties and field.is_no_op is None:
            nothing: list[object] = [None, *([] if field.keeps_false else [False]), "", [], {}]
            properties[name] = {"description": f"Not supported: {field.why}", "enum": [*nothing, *field.no_ops]}


def _operation(method: str, path: str, handler: Any, types: TypeSchemas) -> JsonObject:
    words = re.findall(r"[a-z_]+", path)
    summary = (getattr(handler, "__doc__", None) or path).partition("\n")[0]
    found: JsonObject = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": summary,
        "responses": _responses(path),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if method == "GET":
        queries = _QUERIES.get(path, {})
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in queries.items()]
    if parameters:
        found["parameters"] = parameters
    if method == "POST" and path in BODIES:
        content = {"application/json": {"schema": types.of(BODIES[path])}}
        found["requestBody"] = {"required": True, "content": content}
    elif method == "POST" and path == "/v1/files":
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    return found


def _responses(path: str) -> JsonObject:
    headers = {"x-request-id": {"required": True, "schema": {"type": "string", "pattern": "^req_[0-9a-f]{24}$"}}}
    if path in OTHER_MEDIA:
        content: JsonObject = {OTHER_MEDIA[path]: {"schema": _STRING}}
    else:
        content = {"application/json": {"schema": {"type": "object", "required": ANSWERS[path].split()}}}
    dialect = dialect_of(path)
    if path in STREAMING:
        content[dialect.stream_media.partition(b";")[0].decode()] = {}  # a stream, which OpenAPI has no words for
    error = {"$ref": f"#/components/schemas/{dialect.error_name}"}
    refused = {
        "description": "What was wrong with the request, or with the server.",
        "headers": headers,
        "content": {"application/json": {"schema": error}},
    }
    return {
        "200": {"description": "The answer.", "headers": headers, "content": content},
        "4XX": refused,
        "5XX": refused,
    }
