"""Tool calls, reasoning and constraints over HTTP, on the fake engine, which says whatever a test wants to be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer

from quire.core.failure import Code, Failure
from quire.serve.config import ServerConfig

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</tool_call>"}}\n</tool_call>'
ARGUMENTS = {"a": 1, "b": "</tool_call>"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


@pytest.fixture(scope="module")
def shared_hermes() -> Iterator[LiveServer]:
    config = ServerConfig(port=0, tool_call_parser="hermes", reasoning_parser="qwen3")
    config.verify()
    server = LiveServer(config).start()
    yield server
    server.stop()


@pytest.fixture
def hermes(shared_hermes: LiveServer) -> LiveServer:
    """A server whose model is taken to write calls as Hermes does, and to think."""
    engine = shared_hermes.engine
    engine.text, engine.tokens_a_step, engine.fault = None, 1, lambda request: False
    return shared_hermes


def ask(server: LiveServer, text: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """(message, finish reason) of an answer in which the model says `text`."""
    server.engine.text = text
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": [tool("add")], **fields}
    with server.client() as http:
        answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def ask_in_pieces(server: LiveServer, text: str, n_tokens: int, **fields: Any) -> tuple[dict[str, Any], str]:
    """The same, joined from a stream as OpenAI's client joins it. n_tokens: in one chunk; a token is a byte."""
    server.engine.text, server.engine.tokens_a_step = text, n_tokens
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    chunks = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], stream=True, **{"tools": [tool("add")], **fields}
    )
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for one in delta.tool_calls or []:
            if one.index == len(message["tool_calls"]):
                assert one.id and one.type == "function" and one.function.name  # these come first, and once
                message["tool_calls"].append({"name": one.function.name, "arguments": ""})
            else:
                assert one.id is None and one.function.name is None and one.index == len(message["tool_calls"]) - 1
            message["tool_calls"][one.index]["arguments"] += one.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    return message, reason


TEXTS = [
    "Just words.",
    CALL,
    "Sure.\n" + CALL + "\n" + CALL,
    "<think>\nhm <tool_call>\n</think>\n\n" + CALL,
    "<think>never ends",
    'A call looks like "<tool_call>" with JSON in it.',
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": [',
    "<tool_call>" * 20,
    "",
]


@pytest.mark.parametrize("n_tokens", [1, 7, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_streams_join_to_the_message(hermes: LiveServer, text: str, n_tokens: int) -> None:
    message, reason = ask(hermes, text)
    streamed, streamed_reason = ask_in_pieces(hermes, text, n_tokens)
    assert streamed_reason == reason
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning_content"] == message.get("reasoning_content", "")
    calls = [one["function"] for one in message.get("tool_calls", [])]
    assert streamed["tool_calls"] == calls


def test_calls_have_openais_shape(hermes: LiveServer) -> None:
    message, reason = ask(hermes, "<think>why</think>" + CALL + CALL)
    assert reason == "tool_calls" and message["content"] is None and message["reasoning_content"] == "why"
    assert [one["type"] for one in message["tool_calls"]] == ["function", "function"]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS


def test_a_call_that_the_limit_cuts_says_length(hermes: LiveServer) -> None:
    message, reason = ask(hermes, CALL, max_tokens=50)
    assert reason == "length" and message["tool_calls"][0]["function"]["arguments"].startswith('{"a"')


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("max_tokens", [1, 5, 11, 22, 27])
def test_a_forced_call_that_the_limit_cuts_before_its_arguments_is_no_content(
    hermes: LiveServer, max_tokens: int, choice: Any
) -> None:
    message, reason = ask(hermes, CALL, max_tokens=max_tokens, tool_choice=choice)
    assert reason == "length" and not message["content"] and "tool_calls" not in message
    streamed, reason = ask_in_pieces(hermes, CALL, 1, max_tokens=max_tokens, tool_choice=choice)
    assert reason == "length" and streamed == {"content": "", "reasoning_content": "", "tool_calls": []}
    free, _ = ask(hermes, CALL, max_tokens=max_tokens)
    assert free["content"] == CALL[:max_tokens], "nobody knows what it would have become"


def test_without_tools_text_is_text(hermes: LiveServer) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        message, reason = ask(hermes, CALL, **fields)
        assert message["content"] == CALL and "tool_calls" not in message and reason == "stop"


def test_marks_in_the_users_text_are_not_calls(hermes: LiveServer) -> None:
    message, _ = ask(hermes, "Fine.", messages=[{"role": "user", "content": CALL}])
    assert message["content"] == "Fine." and "tool_calls" not in message


def test_logprobs_of_every_token_come_along(hermes: LiveServer) -> None:
    text = "Hm. " + CALL
    hermes.engine.text, hermes.engine.tokens_a_step = text, 3
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool("add")],
        "stream": True,
        "logprobs": True,
    }
    with hermes.client() as http:
        lines = [line[6:] for line in http.post(CHAT, json=body).text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    rows = [row for choice in choices if choice["logprobs"] for row in choice["logprobs"]["content"]]
    assert "".join(row["token"] for row in rows).startswith(text)


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
        ({"parallel_tool_calls": False}, True),
        ({"parallel_tool_calls": True}, False),
        ({"tools": [tool("add", strict=True)]}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": None, "response_format": {"type": "text"}}, False),
        ({"tools": None, "structured_outputs": {"choice": ["a", "b"]}}, True),
        ({"tools": None, "guided_regex": "a+"}, True),
        ({"tools": None, "guided_json": {"type": "object"}, "guided_whitespace_pattern": " ?"}, True),
        ({"tools": None, "guided_grammar": 'root ::= "a" | "b"'}, True),
    ],
)
def test_what_is_enforced(hermes: LiveServer, fields: dict[str, Any], has_grammar: bool) -> None:
    ask(hermes, CALL, **fields)
    assert hermes.engine.submitted[-1].is_constrained is has_grammar
    if has_grammar:  # a model that thinks may think first
        assert "</think>" in hermes.engine.grammar


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "hiccup"}}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_object"}, "tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice[0]"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_grammar": "x"}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"foo": 1}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    (
        {"tools": [tool("add", strict=True, parameters={"type": "object", "properties": {"a": {"type": "hiccup"}}})]},
        "tools",
    ),
    ({"tools": [tool("add")], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": [tool("add")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tools": [tool("add")], "tool_choice": {"type": "function", "function": {"name": ["add"]}}}, "tool_choice"),
    ({"tools": [tool("add")], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
def test_refusals_name_the_field(hermes: LiveServer, fields: dict[str, Any], param: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **fields}
    with hermes.client() as http:
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
        assert len(answer.json()["error"]["message"]) <= 700
        if "tools" not in fields and "tool_choice" not in fields:
            text = {"model": "fake", "prompt": "x", "max_tokens": 2, **fields}
            answer = http.post("/v1/completions", json=text)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_choice_that_is_not_offered_is_named_with_those_that_are(hermes: LiveServer) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    choice = {"type": "function", "function": {"name": "sub"}}
    many = "'f0', 'f1', 'f2', 'f3', 'f4', 'f5', 'f6', 'f7' and 2 more"
    with hermes.client() as http:
        for names, offered in ((["add", "mul"], "'add', 'mul'"), ([f"f{at}" for at in range(10)], many)):
            fields = {"tools": [tool(name) for name in names], "tool_choice": choice}
            message = http.post(CHAT, json=body | fields).json()["error"]["message"]
            assert message == f"tool_choice names 'sub', which is not in tools: offered are {offered}."


def test_unknown_formats_cannot_be_forced(server: LiveServer) -> None:
    """The fake's template teaches no format that is known: text stays text, and what must be enforced is refused."""
    message, _ = ask(server, CALL)
    assert message["content"] == CALL
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "tools"),
        ({"tools": [tool("add", strict=True)]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": [tool("add")], **fields}
        with server.client() as http:
            answer = http.post(CHAT, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_auto_can_be_switched_off(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(tool_call_parser="hermes", enable_auto_tool_choice=False)
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": [tool("add")]}
    with server.client() as http:
        assert http.post(CHAT, json=body).json()["error"]["param"] == "tool_choice"
        assert http.post(CHAT, json={**body, "tool_choice": "none", "max_tokens": 1}).status_code == 200


def test_arguments_as_text_become_json(make_server: Callable[..., LiveServer]) -> None:
    """Of the function's types, whole and streamed."""
    server = make_server(tool_call_parser="qwen3_coder", reasoning_parser="qwen3")
    types = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    text = (
        "<think>Hm</think>Sure.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    tools = [tool("add", parameters=types)]
    message, reason = ask(server, text, tools=tools)
    assert (message["content"], message["reasoning_content"], reason) == ("Sure.\n", "Hm", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": "2"}'}
    for n_tokens in (1, 7, 1000):
        streamed, _ = ask_in_pieces(server, text, n_tokens, tools=tools)
        assert streamed["tool_calls"] == [message["tool_calls"][0]["function"]]


@pytest.mark.parametrize(
    ("code", "status"), [("empty_mask", 400), ("grammar_failed", 400), ("grammar_too_slow", 400), ("engine_error", 500)]
)
def test_ends_of_constrained_sequences(hermes: LiveServer, code: str, status: int) -> None:
    hermes.engine.fault, hermes.engine.failure_of_faults = (lambda request: True), Failure(Code(code), "why")
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "guided_regex": "[a-z]+"}
    with hermes.client() as http:
        answer = http.post(CHAT, json=body)
    assert answer.status_code == status and answer.json()["error"]["code"] == (
        code if status == 400 else "sequence_fault"
    )
