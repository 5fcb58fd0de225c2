"""Large requests leave the event loop free: they are decoded, checked and rendered by the pool for text."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from quire.serve.http.threads import SHORT_BODY_BYTES
from quire.serve.openai.conversation import MAX_SCHEMA_BYTES, n_chars_of
from quire.serve.openai.prompts import SHORT_CHARS

CHAT = "/v1/chat/completions"
LIMIT_S = 1.0
"""Far above what is seen (0.02 s on two cores), far below the seconds of work on the loop."""


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": "x"}, *messages],
        "max_tokens": 1,
        "add_special_tokens": False,
        **fields,
    }


def tool(index: int = 0, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{index}", **more}}


def call(arguments: str) -> list[dict[str, Any]]:
    asks = {"id": "c", "type": "function", "function": {"name": "f0", "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [asks]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]


LONG = "y" * (SHORT_CHARS + 1)
LONG_BODIES = {
    "content": chat({"role": "user", "content": LONG}),
    "description": chat(tools=[tool(description=LONG)]),
    "parameters": chat(tools=[tool(parameters={"type": "object", "description": LONG})]),
    "parameter names": chat(tools=[tool(parameters={"type": "object", "properties": {LONG: {}}})]),
    "arguments": chat(*call(json.dumps(LONG))),
    "reasoning": chat(
        {"role": "assistant", "content": "a", "reasoning_content": LONG}, {"role": "user", "content": "x"}
    ),
}


class Watched:
    """A chat template that notes which thread renders."""

    def __init__(self, template: Any) -> None:
        self._template = template
        self.threads: list[str] = []

    def render(self, *arguments: Any, **options: Any) -> str:
        self.threads.append(threading.current_thread().name)
        return self._template.render(*arguments, **options)


@pytest.mark.parametrize("name", [*LONG_BODIES, "short"])
def test_long_conversations_are_rendered_by_the_pool(server: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    watched = Watched(server.llm.chat_template)
    monkeypatch.setattr(server.llm, "chat_template", watched)
    with server.client() as http:
        answer = http.post(CHAT, json=LONG_BODIES.get(name, chat()))
    assert answer.status_code == 200, answer.text
    assert [thread.startswith("quire-text") for thread in watched.threads] == [name != "short"]


def test_every_string_counts() -> None:
    assert n_chars_of([]) == 1
    assert n_chars_of({"key": ["four", 1, None]}) == 1 + 3 + 1 + (1 + 4) + 1 + 1


def longest_wait(server: Any, path: str, body: dict[str, Any]) -> tuple[int, float]:
    """Status of a request, and the longest that a GET /version beside it waited."""
    data, begun, done = json.dumps(body).encode(), threading.Event(), threading.Event()
    waits: list[float] = []

    def poll() -> None:
        with server.client() as http:
            while not done.is_set():
                began_s = time.perf_counter()
                assert http.get("/version").status_code == 200
                waits.append(time.perf_counter() - began_s)
                begun.set()

    poller = threading.Thread(target=poll)
    poller.start()
    assert begun.wait(60)
    try:
        with server.client() as http:
            status = http.post(path, content=data, headers={"content-type": "application/json"}).status_code
    finally:
        done.set()
        poller.join()
    return status, max(waits)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, chat(tools=[tool(description="x" * 10_000_000)])),
        (400, chat(tools=[tool(i, parameters={"a": [{"b": {}}] * 9000}) for i in range(100)])),
        (400, chat(*call(json.dumps("x" * 10_000_000)))),
        (400, chat({"role": "user", "content": "x" * 10_000_000})),
        (200, chat(tools=[tool(i, parameters={"a": [1] * 8000}) for i in range(20)])),
    ],
    ids=["description", "parameters", "arguments", "content", "allowed"],
)
def test_others_are_answered_meanwhile(server: Any, status: int, body: dict[str, Any]) -> None:
    assert len(json.dumps(body)) > SHORT_BODY_BYTES
    found, wait_s = longest_wait(server, CHAT, body)
    assert found == status
    assert wait_s < LIMIT_S


def test_schemas_have_a_common_limit(server: Any) -> None:
    half = {"type": "object", "description": "x" * (MAX_SCHEMA_BYTES // 2)}
    with server.client() as http:
        answer = http.post(CHAT, json=chat(tools=[tool(0, parameters=half), tool(1, parameters=half)]))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert str(MAX_SCHEMA_BYTES) in answer.json()["error"]["message"]


def test_a_prompt_with_too_many_tokens_is_refused_before_it_is_looked_at(server: Any) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"model": "fake", "prompt": [[1], [1] * 1_000_000]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
