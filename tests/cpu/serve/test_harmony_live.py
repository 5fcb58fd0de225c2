"""`quire serve` on a tiny random model with gpt-oss's marks and template: what it says is forced by constraints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import byte_model
import openai
import pytest
from test_serve_live import Process

sys.path.insert(0, str(Path(__file__).parents[2] / "null" / "text"))

from chat_templates import HARMONY, HARMONY_MARKS

HI: Any = [{"role": "user", "content": "Hi"}]
SHAPE: Any = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                                            "additionalProperties": False}},
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SHAPE["json_schema"]["schema"]}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = byte_model.make(tmp_path_factory.mktemp("model"))
    byte_model.make_tokenizer(folder, [mark for mark in HARMONY_MARKS if mark != "<|end|>"])
    config = json.loads((folder / "config.json").read_text())
    end = 257 + HARMONY_MARKS.index("<|return|>") - 1
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": end, "bos_token_id": None}))
    tokenizer_config = {"eos_token": "<|return|>", "chat_template": HARMONY}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    process = Process(str(folder), "--load-format", "dummy", "--served-model-name", "tiny")
    process.wait_ready()
    yield openai.OpenAI(base_url=process.base + "/v1", api_key="none", max_retries=0)
    process.stop()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """The same whole and streamed."""
    extra = {"thinking_token_budget": fields.pop("budget", 6)}
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 300, "temperature": 1, "seed": 3, "extra_body": extra}
    whole = client.chat.completions.create(**asked, **fields)
    told: dict[str, str] = {"content": "", "reasoning_content": "", "arguments": ""}
    for chunk in client.chat.completions.create(**asked, **fields, stream=True):
        delta: Any = chunk.choices[0].delta
        told["content"] += delta.content or ""
        told["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        told["arguments"] += "".join(one.function.arguments or "" for one in delta.tool_calls or [])
    message = whole.choices[0].message
    assert told["content"] == (message.content or "")
    assert told["reasoning_content"] == (getattr(message, "reasoning_content", None) or "")
    assert told["arguments"] == "".join(one.function.arguments for one in message.tool_calls or [])
    assert "<|" not in told["content"]
    return whole


def test_an_answer_is_constrained_behind_bounded_reasoning(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=SHAPE)
    assert json.loads(answer.choices[0].message.content) in ({"a": 1}, {"a": 2})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) in ({"a": 1}, {"a": 2})
    assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    history = [*HI, answer.choices[0].message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(
        model="tiny", messages=history, tools=[TOOL], response_format=SHAPE, max_tokens=300, temperature=0,
        extra_body={"thinking_token_budget": 0},
    )  # fmt: skip
    message = again.choices[0].message
    assert message.tool_calls or json.loads(message.content) in ({"a": 1}, {"a": 2})
