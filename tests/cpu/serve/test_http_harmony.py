"""gpt-oss's messages over HTTP: reasoning, content and calls on every endpoint, and constraints in the right place.

The fake engine says whatever a test wants to be read, in a tokenizer whose marks are control tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "null" / "text"))

from chat_templates import HARMONY, HARMONY_MARKS
from live_server import LiveServer
from serve_fakes import FakeEngine, byte_tokenizer
from test_http_tools import ask, ask_in_pieces, tool

from quire.core.errors import ConfigError
from quire.serve.config import ServerConfig

MARKS = [mark for mark in HARMONY_MARKS if mark != "<|end|>"]
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm, so"
PREAMBLE = "<|channel|>commentary<|message|>Let me see."
FINAL = "<|channel|>final<|message|>It is 3."
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
ARGUMENTS = '{"a": 1}'
ALL = [THOUGHT, PREAMBLE, CALL]


def make(**options: Any) -> LiveServer:
    config = ServerConfig(port=0, enable_chat_template_kwargs=True, **options)
    config.verify()
    end = byte_tokenizer(MARKS).token_id("<|return|>") or 0
    return LiveServer(config, engine=FakeEngine(MARKS, end), template=HARMONY).start()


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    server = make()
    yield server
    server.stop()


@pytest.fixture
def server(shared: LiveServer) -> LiveServer:
    shared.engine.text, shared.engine.tokens_a_step = None, 1
    return shared


def prompt_of(server: LiveServer) -> str:
    ids = server.engine.submitted[-1].prompt_token_ids
    return server.llm.tokenizer.decode(ids, skip_special_tokens=False)  # type: ignore[union-attr]


@pytest.mark.parametrize("n_tokens", [1, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [THOUGHT + NEXT + FINAL, NEXT.join(ALL), CALL, FINAL, "Plain.", THOUGHT, f"{FINAL} <|end|> {CALL}", "<|channel|>"],
)
def test_streams_join_to_the_message(server: LiveServer, text: str, n_tokens: int) -> None:
    message, reason = ask(server, text)
    streamed, streamed_reason = ask_in_pieces(server, text, n_tokens)
    assert streamed_reason == reason == ("tool_calls" if CALL in text else "stop")
    assert streamed["content"] == (message["content"] or "")
    assert streamed["reasoning_content"] == message.get("reasoning_content", "")
    assert streamed["tool_calls"] == [one["function"] for one in message.get("tool_calls", [])]
    assert "<|" not in (message["content"] or "")


def test_a_message_has_its_parts(server: LiveServer) -> None:
    message, reason = ask(server, NEXT.join(ALL))
    assert message["reasoning_content"] == message["reasoning"] == "Hm, so" and message["content"] == "Let me see."
    assert reason == "tool_calls" and message["tool_calls"][0]["function"] == {"name": "add", "arguments": ARGUMENTS}
    message, reason = ask(server, THOUGHT + NEXT + FINAL, tools=None)
    assert (message["reasoning_content"], message["content"], reason) == ("Hm, so", "It is 3.", "stop")


def test_tokens_of_reasoning_are_told(server: LiveServer) -> None:
    server.engine.text = THOUGHT + NEXT + FINAL
    with server.client() as http:
        body = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("Hm, so")}


def test_a_result_goes_back_with_the_thought(server: LiveServer) -> None:
    message, _ = ask(server, NEXT.join(ALL))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3 <|call|>"}
    history = [{"role": "user", "content": "1 + 2?"}, message, result]
    answer, _ = ask(server, FINAL, messages=history, reasoning_effort="high", tools=[tool("add")])
    assert answer["content"] == "It is 3."
    prompt = prompt_of(server)
    assert "Reasoning: high" in prompt
    assert prompt.partition("1 + 2?")[2] == (
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm, so\n\nLet me see.<|end|><|start|>assistant "
        f"to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|><|start|>functions.add to=assistant"
        '<|channel|>commentary<|message|>"3 <|call|>"<|end|><|start|>assistant'
    )
    call_id = server.llm.tokenizer.token_id("<|call|>")  # type: ignore[union-attr]
    assert server.engine.submitted[-1].prompt_token_ids.count(call_id) == 1, "what a tool says makes no mark"


def test_responses(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0)
    server.engine.text = NEXT.join(ALL)
    add: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": None}
    asked: Any = {"model": "fake", "tools": [add]}
    whole = client.responses.create(input="1 + 2?", **asked)
    with client.responses.stream(input="1 + 2?", **asked) as stream:
        final = stream.get_final_response()
    for answer in (whole, final):
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.output_text == "Let me see." and answer.output[2].arguments == ARGUMENTS  # type: ignore[union-attr]
    items: list[Any] = [{"role": "user", "content": "1 + 2?"}, *[item.model_dump() for item in whole.output]]
    items += [{"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "3"}]  # type: ignore[union-attr]
    server.engine.text = FINAL
    assert client.responses.create(input=items, **asked).output_text == "It is 3."
    assert "<|message|>Hm, so\n\nLet me see.<|end|><|start|>assistant to=functions.add" in prompt_of(server)


def test_messages(server: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0)
    server.engine.text = NEXT.join(ALL)
    add: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
    asked: Any = {"model": "fake", "max_tokens": 1000, "tools": [add], "messages": [{"role": "user", "content": "x"}]}
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for answer in (client.messages.create(**asked), final):
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"a": 1} and answer.stop_reason == "tool_use"  # type: ignore[union-attr]


SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"tools": None, "response_format": SHAPE}, "start: thought* {final} @body"),
        ({"response_format": SHAPE}, "start: thought* ({final} @body | @calls)"),
        ({"tool_choice": "required"}, "start: note* @calls"),
        ({"tools": [tool("add", strict=True)]}, "start: note* @calls"),
        ({"tools": None, "thinking_token_budget": 5}, "start: thought* {final} @body"),
        ({"thinking_token_budget": 5}, "start: thought? @calls"),
    ],
)
def test_constraints_stand_behind_the_reasoning(server: LiveServer, fields: dict[str, Any], start: str) -> None:
    ask(server, FINAL, **fields)
    channel, message = (server.llm.tokenizer.token_id(mark) for mark in ("<|channel|>", "<|message|>"))  # type: ignore[union-attr]
    frame = json.loads(server.engine.grammar)["grammars"][0]["lark_grammar"]
    assert frame.startswith(start.format(final=f'<[{channel}]> "final" <[{message}]>') + "\n")
    bound = server.engine.submitted[-1].params.structured_outputs
    assert bound is not None and bound.begins_within == fields.get("thinking_token_budget")


def test_an_answer_that_is_continued_is_constrained_at_once(server: LiveServer) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]
    fields = {"messages": history, "add_generation_prompt": False, "continue_final_message": True}
    message, _ = ask(server, " 3.", tools=None, structured_outputs={"choice": [" 3."]}, **fields)
    assert message["content"] == " 3." and prompt_of(server).endswith("<|channel|>final<|message|>It is")
    assert len(json.loads(server.engine.grammar)["grammars"]) == 1
    body = {"model": "fake", "tools": [tool("add")], "tool_choice": "required", **fields}
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "continue_final_message"
    function = {"name": "add", "arguments": "{}"}
    history[1] |= {"tool_calls": [{"id": "a", "type": "function", "function": function}]}  # its content is a thought
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json={"model": "fake", **fields, "thinking_token_budget": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"


def test_a_call_ends_the_turn_whatever_the_files_say(server: LiveServer) -> None:
    """Its end token here is <|return|> alone."""
    tokenizer = server.llm.tokenizer
    ends = {tokenizer.token_id("<|return|>"), tokenizer.token_id("<|call|>")}  # type: ignore[union-attr]
    ask(server, CALL)
    assert set(server.engine.submitted[-1].params.stop_token_ids) == ends
    ask(server, CALL, ignore_eos=True, max_tokens=100)
    assert server.engine.submitted[-1].params.stop_token_ids == []


def test_parsers_by_name() -> None:
    for options, reasoning, calls in (
        ({"reasoning_parser": "none"}, None, 1),
        ({"tool_call_parser": "none"}, "Hm, so", 0),
        ({"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}, "Hm, so", 1),
        ({"tool_call_parser": "none", "reasoning_parser": "none"}, None, 0),
    ):
        server = make(**options)
        try:
            message, _ = ask(server, NEXT.join(ALL))
        finally:
            server.stop()
        assert message.get("reasoning_content") == reasoning and len(message.get("tool_calls", [])) == calls
    for options in ({"tool_call_parser": "openai", "reasoning_parser": "qwen3"},
                    {"tool_call_parser": "hermes", "reasoning_parser": "openai_gptoss"}):  # fmt: skip
        with pytest.raises(ConfigError, match="go together"):
            ServerConfig(**options).verify()
