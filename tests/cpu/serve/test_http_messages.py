"""/v1/messages and /v1/messages/count_tokens with the anthropic client, its stream of events, and hostile bodies."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from serve_fakes import ASSISTANT, USER, reply_to
from test_http_hostile import check_error, http  # noqa: F401
from test_http_tools import CALL, hermes, shared_hermes  # noqa: F401

PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base, api_key="unused", max_retries=0)


def shown_prompt(server: Any) -> str:
    return server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=True)


def test_create(server: Any, client: anthropic.Anthropic) -> None:
    server.engine.cached_tokens = 8
    answer = client.messages.create(
        model="fake",
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=HI,
        max_tokens=12,
        metadata={"user_id": "u1"},
    )
    prompt = [USER, *server.llm.tokenizer.encode("system:Be brief.\n"), USER]
    prompt += [*server.llm.tokenizer.encode("user:Hi\n"), ASSISTANT]
    assert server.engine.submitted[-1].prompt_token_ids == prompt
    assert [block.text for block in answer.content if block.type == "text"] == [reply_to(prompt)[:12]]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("max_tokens", None, "assistant")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (len(prompt) - 8, 8, 12)
    assert answer._request_id is not None and answer._request_id.startswith("req_")


def test_a_stream_builds_the_whole_message(server: Any, client: anthropic.Anthropic) -> None:
    server.engine.text = "Good day, ünïcode 🙂 to you."
    whole = client.messages.create(model="fake", messages=HI, max_tokens=100)
    with client.messages.stream(model="fake", messages=HI, max_tokens=100) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text == server.engine.text  # type: ignore[union-attr]
    assert final.usage == whole.usage
    assert final.stop_reason == whole.stop_reason == "end_turn"
    raw = client.messages.create(model="fake", messages=HI, max_tokens=100, stream=True)
    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stop_sequences(server: Any, client: anthropic.Anthropic) -> None:
    server.engine.text = "one, two, three"
    answer = client.messages.create(model="fake", messages=HI, max_tokens=50, stop_sequences=[" three", ", two"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ", two")
    assert answer.content[0].text == "one"  # type: ignore[union-attr]


def test_calls_and_results(server: Any, client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "adding", "signature": ""}, {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 2}},
            {"type": "tool_use", "id": "b", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "b", "content": "5"},
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "6"}]},
            {"type": "text", "text": "Well?"},
        ]},
    ]  # fmt: skip
    client.messages.create(model="fake", messages=messages, tools=[TOOL], max_tokens=2)
    assert shown_prompt(server) == "tools:add,user:2 + 3?\nassistant:Let me see.\ntool:5\ntool:6\nuser:Well?\n"


def test_the_last_assistant_turn_is_continued(server: Any, client: anthropic.Anthropic) -> None:
    client.messages.create(model="fake", messages=[*HI, {"role": "assistant", "content": "Good"}], max_tokens=2)
    assert shown_prompt(server) == "user:Hi\nassistant:Good"


def blocks(message: Any) -> list[Any]:
    return [block.model_dump(include={"type", "text", "thinking", "name", "input"}) for block in message.content]


@pytest.mark.parametrize("n_tokens", [1, 7, 1000])
def test_reasoning_text_and_calls(hermes: Any, n_tokens: int) -> None:  # noqa: F811
    client = anthropic.Anthropic(base_url=hermes.base, api_key="unused", max_retries=0)
    hermes.engine.text, hermes.engine.tokens_a_step = f"<think>Hm.</think>Let me see.{CALL}{CALL}", n_tokens
    options: Any = {"model": "fake", "messages": HI, "max_tokens": 1000, "tools": [TOOL]}
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        final = stream.get_final_message()
    call = {"type": "tool_use", "name": "add", "input": {"a": 1, "b": "</tool_call>"}}
    expected = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Let me see."}, call, call]
    assert blocks(whole) == blocks(final) == expected
    assert whole.stop_reason == final.stop_reason == "tool_use" and whole.usage == final.usage
    assert len({block.id for block in final.content[2:]}) == 2
    again = [*HI, {"role": "assistant", "content": whole.model_dump(exclude_none=True)["content"]}]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in whole.content[2:]]
    client.messages.create(**{**options, "messages": [*again, {"role": "user", "content": results}]})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_forced_calls_are_constrained(hermes: Any, choice: Any) -> None:  # noqa: F811
    client = anthropic.Anthropic(base_url=hermes.base, api_key="unused", max_retries=0)
    hermes.engine.text = CALL
    one = {**choice, "disable_parallel_tool_use": True}
    client.messages.create(model="fake", messages=HI, max_tokens=1000, tools=[TOOL], tool_choice=one)
    assert hermes.engine.submitted[-1].is_constrained


def test_a_schema_for_the_text(server: Any, client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    client.messages.create(model="fake", messages=HI, max_tokens=5, output_config=form)
    assert server.engine.submitted[-1].is_constrained


def test_count_tokens(server: Any, client: anthropic.Anthropic) -> None:
    n = client.messages.count_tokens(model="fake", messages=HI, system="Be brief.", tools=[TOOL]).input_tokens
    answer = client.messages.create(model="fake", messages=HI, system="Be brief.", tools=[TOOL], max_tokens=1)
    assert n == answer.usage.input_tokens > len("Be brief.")


def test_errors_are_the_clients_own(server: Any, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=HI, max_tokens=2)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="fake", messages=HI, max_tokens=0)
    server.engine.fault = lambda request: True
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(model="fake", messages=HI, max_tokens=20)
    with pytest.raises(anthropic.APIStatusError, match="engine failed"):
        list(client.messages.create(model="fake", messages=HI, max_tokens=20, stream=True))


def test_both_ways_to_send_a_key(make_server: Any) -> None:
    server = make_server(api_key="abc")
    both = {"api_key": "abc", "default_headers": {"authorization": "Bearer abc"}}
    for options in ({"api_key": "abc"}, {"auth_token": "abc"}, both):
        client = anthropic.Anthropic(base_url=server.base, max_retries=0, **options)
        assert client.messages.create(model="fake", messages=HI, max_tokens=2).content
    for options in ({"api_key": "abcd"}, {"auth_token": "ab"}):
        client = anthropic.Anthropic(base_url=server.base, max_retries=0, **options)
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="fake", messages=HI, max_tokens=2)


def block(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [fields]}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": None}, "max_tokens"), ({"temperature": 1.5}, "temperature"),
    ({"temperature": True}, "temperature"), ({"top_p": 2}, "top_p"), ({"top_k": -5}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"), ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"), ({"metadata": {"user_id": "a\nb"}}, "metadata.user_id"),
    ({"messages": []}, "messages"), ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"), ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0]"), ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"system": "a", "messages": [{"role": "user", "content": []}]}, "messages[0]"),
    ({"messages": block(type="image", source={"type": "url", "url": "http://169.254.169.254/"})}, "messages[0]"),
    ({"messages": block(type="document", source={"type": "text", "data": "x"})}, "messages[0]"),
    ({"messages": block(type="thinking", thinking="x")}, "messages[0].content"),
    ({"messages": block(type="tool_use", id="a", name="f", input={})}, "messages[0].content"),
    ({"messages": block(type="tool_result", tool_use_id="a", content="1")}, "messages[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 5}]}]},
     "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                   {"role": "user", "content": "x"}]}, "messages[1]"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"), ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "hiccup"}}}},
     "output_config.format.schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "adaptive", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"mcp_servers": [{}]}, "mcp_servers"), ({"container": "x"}, "container"),
    ({"priority": 3}, "priority"), ({"cache_salt": "x" * 300}, "cache_salt"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
def test_what_is_wrong_is_named_in_the_clients_words(http: httpx.Client, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    body = {"model": "fake", "messages": HI, "max_tokens": 2, **fields}
    for stream in (False, True):
        error = check_error(http.post(PATH, json={**body, "stream": stream}), 400)
        assert param in error["message"], error


def test_null_is_the_same_as_nothing(http: httpx.Client) -> None:  # noqa: F811
    from quire.serve.anthropic.schema import MessagesRequest

    needed = {"model": "fake", "messages": HI, "max_tokens": 1}
    nulls = {name: None for name in MessagesRequest.__struct_fields__ if name not in needed}
    assert http.post(PATH, json={**nulls, **needed}).status_code == 200


def test_threads_are_not_kept(client: anthropic.Anthropic, http: httpx.Client) -> None:  # noqa: F811
    began = client.messages.with_raw_response.create(
        model="fake", messages=HI, max_tokens=8, extra_body={"thread": {"type": "create"}}
    )
    assert began.headers["x-ignored-params"] == "thread"
    thread = {"type": "continue", "previous_message_id": began.parse().id}
    for path in (PATH, PATH + "/count_tokens"):
        body = {"model": "fake", "messages": HI, "max_tokens": 8, "thread": thread}
        answer = http.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 404 and error["details"] == {"error_code": "thread_not_found"}
        assert error["type"] == "not_found_error" and thread["previous_message_id"] in error["message"]
    wrong = http.post(PATH, json={"model": "fake", "messages": HI, "max_tokens": 8, "thread": {"type": "x"}})
    assert wrong.status_code == 400 and "thread.type" in wrong.json()["error"]["message"]
