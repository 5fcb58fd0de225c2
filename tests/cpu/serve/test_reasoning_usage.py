"""Usage says how many of the tokens were reasoning, whole and streamed, for each choice."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from test_http_tools import hermes, shared_hermes  # noqa: F401

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]


def last_usage(answer: httpx.Response) -> dict[str, Any]:
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    usage: dict[str, Any] = events[-1].get("usage") or events[-1]["response"]["usage"]
    return usage


@pytest.mark.parametrize("n_tokens", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "n_reasoning"),
    [("<think>hm, so</think>yes", 6), ("<think>\nünsure</think>", 8), ("no reasoning here", 0), ("<think>cut", 3)],
)
def test_reasoning_tokens(hermes: Any, text: str, n_reasoning: int, n_tokens: int) -> None:  # noqa: F811
    """A token is a byte, and each mark has several."""
    hermes.engine.text, hermes.engine.tokens_a_step = text, n_tokens
    n_output = len(text.encode()) + 1
    counts = {"reasoning_tokens": n_reasoning}
    with hermes.client() as client:
        for n in (1, 3):
            body = {"model": "fake", "messages": HI, "n": n}
            usage = client.post(CHAT, json=body).json()["usage"]
            streamed = {"stream": True, "stream_options": {"include_usage": True}}
            assert usage == last_usage(client.post(CHAT, json=body | streamed))
            assert usage["completion_tokens_details"] == {"reasoning_tokens": n * n_reasoning}
            assert usage["completion_tokens"] == n * n_output
        body = {"model": "fake", "input": "Hi"}
        for usage in (
            client.post(RESPONSES, json=body).json()["usage"],
            last_usage(client.post(RESPONSES, json=body | {"stream": True})),
        ):
            assert usage["output_tokens_details"] == counts and usage["output_tokens"] == n_output


def test_a_model_that_does_not_reason_has_none(make_server: Any) -> None:
    """Its marks are text like any other, and nobody looks for them."""
    server = make_server()
    server.engine.text = "<think>hm</think>yes"
    with server.client() as client:
        answer = client.post(CHAT, json={"model": "fake", "messages": HI}).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert answer["choices"][0]["message"]["content"] == server.engine.text
