"""/v1/responses with openai-python, its stream of events, and hostile bodies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from serve_fakes import ASSISTANT, USER, reply_to
from test_http_hostile import check_error, http  # noqa: F401
from test_http_tools import CALL, hermes, shared_hermes  # noqa: F401

PATH = "/v1/responses"


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0)


def prompt_of(server: Any, text: str) -> list[int]:
    return [USER, *server.llm.tokenizer.encode(text), ASSISTANT]


def test_create(server: Any, client: openai.OpenAI) -> None:
    server.engine.cached_tokens = 8
    answer = client.responses.create(
        model="fake", input="Hi", instructions="Be brief.", max_output_tokens=12, temperature=0.5, metadata={"a": "b"}
    )
    prompt = [USER, *server.llm.tokenizer.encode("system:Be brief.\n"), *prompt_of(server, "user:Hi\n")]
    assert server.engine.submitted[-1].prompt_token_ids == prompt
    assert answer.output_text == reply_to(prompt)[:12]
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.temperature, answer.metadata, answer.instructions) == (0.5, {"a": "b"}, "Be brief.")
    usage = answer.usage
    assert usage is not None and (usage.input_tokens, usage.output_tokens) == (len(prompt), 12)
    assert usage.total_tokens == len(prompt) + 12 and usage.input_tokens_details.cached_tokens == 8


def test_a_stream_builds_the_whole_response(server: Any, client: openai.OpenAI) -> None:
    server.engine.text = "Good day, ünïcode 🙂 to you."
    whole = client.responses.create(model="fake", input="Hi")
    with client.responses.stream(model="fake", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert (
        "".join(event.delta for event in events[4:-4]) == whole.output_text == final.output_text == server.engine.text
    )
    assert final.usage == whole.usage and final.status == whole.status == "completed"
    assert final.output[0].status == "completed"


def test_an_answer_goes_back_as_it_came(server: Any, client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="Hi", max_output_tokens=5)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    items += [item.model_dump() for item in first.output]
    items += [{"type": "message", "role": "user", "content": "And?"}]
    client.responses.create(model="fake", input=items, max_output_tokens=5)
    text = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=True)
    assert text == f"user:Hi\nassistant:{first.output_text}\nuser:And?\n"


def test_calls_and_results_join_to_one_turn(server: Any, client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": None}
    items: Any = [
        {"role": "user", "content": "2 + 3?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "adding"}]},
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "5"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "6"}]},
    ]
    client.responses.create(model="fake", input=items, tools=[tool], max_output_tokens=2)
    text = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=True)
    assert text == "tools:add,user:2 + 3?\nassistant:Let me see.\ntool:5\ntool:6\n"


TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}


def items(response: Any) -> list[Any]:
    """What the client shows of each item, but for its ids and what the client adds."""
    kept = {"type", "content", "name", "arguments", "status"}
    return [item.model_dump(include=kept, exclude_none=True) for item in response.output]


@pytest.mark.parametrize("n_tokens", [1, 7, 1000])
def test_reasoning_text_and_calls(hermes: Any, n_tokens: int) -> None:  # noqa: F811
    client = openai.OpenAI(base_url=hermes.base + "/v1", api_key="unused", max_retries=0)
    hermes.engine.text, hermes.engine.tokens_a_step = f"<think>Hm.</think>Let me see.{CALL}{CALL}", n_tokens
    whole = client.responses.create(model="fake", input="Hi", tools=[TOOL])
    with client.responses.stream(model="fake", input="Hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert items(whole) == items(final) and whole.output_text == final.output_text == "Let me see."
    assert whole.output[0].content[0].text == "Hm."  # type: ignore[union-attr]
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": "</tool_call>"}] * 2
    assert len({call.call_id for call in calls}) == 2
    for call in calls:
        told = [event.delta for event in events if getattr(event, "item_id", "") == call.id and hasattr(event, "delta")]
        assert "".join(told) == call.arguments
    back: Any = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in whole.output)]
    back += [{"type": "function_call_output", "call_id": item.call_id, "output": "3"}
             for item in whole.output if item.type == "function_call"]  # fmt: skip
    client.responses.create(model="fake", input=back, tools=[TOOL])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_forced_calls_are_constrained(hermes: Any, choice: Any) -> None:  # noqa: F811
    client = openai.OpenAI(base_url=hermes.base + "/v1", api_key="unused", max_retries=0)
    hermes.engine.text = CALL
    client.responses.create(model="fake", input="Hi", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert hermes.engine.submitted[-1].is_constrained


def test_a_schema_for_the_text(server: Any, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    answer = client.responses.create(model="fake", input="Hi", text=form, max_output_tokens=5)
    assert server.engine.submitted[-1].is_constrained
    assert answer.text is not None and answer.text.format.type == "json_schema"


def test_logprobs(server: Any, client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    whole = client.responses.create(model="fake", input="Hi", include=include, top_logprobs=2, max_output_tokens=6)
    rows = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert rows is not None and len(rows) == 6 and all(len(row.top_logprobs) == 2 for row in rows)
    stream = client.responses.create(
        model="fake", input="Hi", include=include, top_logprobs=2, max_output_tokens=6, stream=True
    )
    told = [row for event in stream if event.type == "response.output_text.delta" for row in event.logprobs]
    assert [row.logprob for row in told] == [row.logprob for row in rows]


def test_a_fault_on_the_way(server: Any, client: openai.OpenAI) -> None:
    server.engine.fault = lambda request: True
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="fake", input="Hi")
    kinds = []
    with pytest.raises(openai.APIError, match="engine failed"):
        for event in client.responses.create(model="fake", input="Hi", stream=True):
            kinds.append(event.type)
    assert kinds[-1] == "response.failed"


def test_bytes_of_a_stream(server: Any) -> None:
    with server.client() as plain:
        answer = plain.post(PATH, json={"model": "fake", "input": "x", "stream": True, "max_output_tokens": 3})
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "[DONE]" not in answer.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"), ({"truncation": "middle"}, "truncation"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 101}, "temperature"), ({"top_p": 0}, "top_p"), ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": ["x"]}, "input[0]"), ({"input": [[]]}, "input[0]"),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"), ({"input": "x" * 500_000}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"), ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "k" * 1_000_000}]}, "input[0].type"), ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": ""}]}, "input[1]"),
    ({"instructions": "a", "input": [{"role": "user", "content": []}]}, "input[0]"),
    ({"instructions": ""}, "instructions"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://169.254.169.254/"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "1"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"role": "user", "content": "x"}]}, "input[1]"),
    ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b", "parameters": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "hiccup"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"input": json.loads("[" * 100 + "]" * 100)}, "input[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
def test_what_is_wrong_is_named_in_the_clients_words(http: httpx.Client, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    body = {"model": "fake", "input": "x", "max_output_tokens": 2, **fields}
    for stream in (False, True):
        error = check_error(http.post(PATH, json={**body, "stream": stream or body.get("stream", False)}), 400, param)
        assert error["param"] == param
        assert "messages[" not in error["message"]
        if param.endswith(".role") and "robot" in error["message"]:
            assert error["message"].endswith("it must be one of assistant, user, system, developer.")


def test_null_is_the_same_as_nothing(http: httpx.Client) -> None:  # noqa: F811
    from quire.serve.openai.responses_schema import ResponsesRequest

    nulls = {name: None for name in ResponsesRequest.__struct_fields__ if name not in ("model", "input")}
    assert http.post(PATH, json={**nulls, "model": "fake", "input": "x", "max_output_tokens": 1}).status_code == 200
    items = [{"type": None, "role": "user", "content": "x", "id": None, "status": None}]
    assert http.post(PATH, json={"model": "fake", "input": items, "max_output_tokens": 1}).status_code == 200
