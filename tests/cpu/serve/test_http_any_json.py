"""Any JSON whatever is answered or refused by name: fields, items and blocks that nobody would write."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from http_bodies import CHAT, JSON_HEADERS, TEXT, check_error, valid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.serve.anthropic.schema import CountTokensRequest, MessagesRequest
from quire.serve.batch.batches import BatchRequest
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import Refusal
from quire.serve.openai.responses_schema import ResponsesRequest
from quire.serve.openai.schema import ChatRequest, CompletionRequest, EmbeddingRequest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})


@pytest.fixture(scope="module")
def open_client(shared_server: Any) -> Any:
    with shared_server.client() as client:
        yield client


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from([CHAT, TEXT]), fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_any_json_is_answered_or_refused(open_client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = open_client.post(path, content=json.dumps({**valid(path), **fields}).encode(), headers=JSON_HEADERS)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        check_error(answer, answer.status_code)


BODIES = {
    "/v1/responses": ResponsesRequest, "/v1/messages": MessagesRequest, "/v1/embeddings": EmbeddingRequest,
    "/v1/messages/count_tokens": CountTokensRequest, "/v1/batches": BatchRequest,
}  # fmt: skip
parts = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "user", "assistant", "text", "auto"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["type", "role", "content", "text", "id", "call_id", "name", "input", "output", "arguments", "tool_use_id"]
        ),
        inner | st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "input_text"])
        | st.sampled_from(["output_text", "tool_use", "tool_result", "thinking"]),
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), path=st.sampled_from(sorted(BODIES)))
def test_any_items_and_blocks_are_answered_or_refused(open_client: httpx.Client, path: str, data: Any) -> None:
    names = st.sampled_from(BODIES[path].__struct_fields__)
    fields = data.draw(st.dictionaries(names, parts | json_values, max_size=3))
    answer = open_client.post(path, content=json.dumps({**valid(path), **fields}).encode(), headers=JSON_HEADERS)
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        check_error(answer, answer.status_code)


@settings(max_examples=300)
@given(
    st.binary(max_size=200)
    | st.text(max_size=100).map(str.encode)
    | json_values.map(lambda value: json.dumps(value).encode())
)
def test_decoder_refuses_or_returns(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest, *BODIES.values()):
        try:
            assert isinstance(BodyDecoder(kind).decode(body, IgnoredParams()), kind)
        except Refusal as refusal:
            assert refusal.status == 400
