"""Edits, tools and items of other servers: what asks for nothing here is skipped by name, what would change the answer
is refused in the client's own words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from test_http_hostile import check_error, http  # noqa: F401

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Hi"}
SCHEMA: Any = {"type": "object", "properties": {}}
CUSTOM = {"name": "add", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def turns(n: int) -> list[Any]:
    """A conversation with so many thoughts, calls and results."""
    found = [USER]
    for at in range(n):
        name = "add" if at % 2 == 0 else "mul"
        call = {"type": "tool_use", "id": f"t{at}", "name": name, "input": {}}
        thought = {"type": "thinking", "thinking": "hm", "signature": ""}
        found.append({"role": "assistant", "content": [thought, call]})
        found.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{at}", "content": "5"}]})
    return found


def send(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:  # noqa: F811
    most = {MESSAGES: {"max_tokens": 2}, RESPONSES: {"max_output_tokens": 2}, CHAT: {"max_tokens": 2}}
    return http.post(path, json={"model": "fake", **most.get(path, {}), **fields})


def limit(kind: str, value: int) -> dict[str, Any]:
    return {"type": kind, "value": value}


CLEAR, THINK, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
EDITS: list[tuple[dict[str, Any], int, bool]] = [
    ({"type": CLEAR}, 0, True), ({"type": CLEAR}, 5, True),  # below 100,000 tokens
    ({"type": CLEAR, "trigger": limit("input_tokens", 10)}, 3, True),  # as many as are kept
    ({"type": CLEAR, "trigger": limit("input_tokens", 10)}, 4, False),
    ({"type": CLEAR, "trigger": limit("input_tokens", 10), "exclude_tools": ["mul"]}, 6, True),
    ({"type": CLEAR, "trigger": limit("tool_uses", 4)}, 4, True),
    ({"type": CLEAR, "trigger": limit("tool_uses", 3), "keep": limit("tool_uses", 1)}, 4, False),
    ({"type": CLEAR, "trigger": {"type": "moon"}}, 4, False), ({"type": CLEAR, "keep": "some"}, 0, True),
    ({"type": THINK}, 0, True), ({"type": THINK}, 1, True), ({"type": THINK}, 2, False),
    ({"type": THINK, "keep": "all"}, 2, True), ({"type": THINK, "keep": limit("thinking_turns", 2)}, 2, True),
    ({"type": COMPACT}, 2, True), ({"type": COMPACT, "trigger": limit("input_tokens", 5)}, 2, False),
    ({"type": "forget_everything_20300101"}, 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "n", "is_taken"), EDITS, ids=[str(i) for i in range(len(EDITS))])
def test_an_edit_that_finds_nothing_to_do(
    http: httpx.Client,  # noqa: F811
    edit: dict[str, Any],
    n: int,
    is_taken: bool,
) -> None:
    for path in (MESSAGES, MESSAGES + "/count_tokens"):
        answer = send(http, path, messages=turns(n), context_management={"edits": [edit]})
        if is_taken:
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ignored-params"] == "context_management"
        else:
            message = check_error(answer, 400)["message"]
            assert message.startswith("context_management.edits[0] is not supported") and edit["type"] in message


@pytest.mark.parametrize("value", [{"edits": 5}, {"edits": [5]}, {"edits": [{}]}, {"x": 1}, {"edits": [{}] * 17}, []])
def test_edits_of_another_shape(http: httpx.Client, value: Any) -> None:  # noqa: F811
    message = check_error(send(http, MESSAGES, messages=[USER], context_management=value), 400)["message"]
    assert "context_management" in message


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "computer_20250124", "memory_20250818"])
def test_a_tool_that_the_client_runs_needs_a_schema(http: httpx.Client, kind: str) -> None:  # noqa: F811
    answer = send(http, MESSAGES, messages=[USER], tools=[CUSTOM, {"type": kind, "name": kind.partition("_")[0]}])
    message = check_error(answer, 400)["message"]
    assert message.startswith(f"tools[1].type is not supported: '{kind}'")
    assert "schema" in message and "custom tool" in message and "input_schema" in message


def test_a_tool_that_a_server_runs_is_skipped(http: httpx.Client) -> None:  # noqa: F811
    for kind in ("web_search", "web_fetch", "code_execution"):
        tool = {"type": f"{kind}_20250910", "name": kind}
        answer = send(http, MESSAGES, messages=[USER], tools=[CUSTOM, tool], tool_choice={"type": "auto"})
        assert answer.status_code == 200 and answer.headers["x-ignored-params"] == f"tools[{kind}]"


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([SEARCH], {"type": "any"}, "tool_choice.type = any needs tools with an input_schema; those that a server"),
        (None, {"type": "tool", "name": "add"}, "tool_choice.type = tool needs tools with an input_schema."),
        ([SEARCH, CUSTOM], {"type": "tool", "name": "web_search"}, "tool_choice.name = 'web_search' is no tool with"),
        ([CUSTOM], {"type": "tool"}, "tool_choice.name = None is no tool with an input_schema: there are 'add'."),
    ],
)
def test_a_choice_without_its_tool(http: httpx.Client, tools: Any, choice: Any, words: str) -> None:  # noqa: F811
    message = check_error(send(http, MESSAGES, messages=[USER], tools=tools, tool_choice=choice), 400)["message"]
    assert message.startswith(words) and "function" not in message


ENCRYPTED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
PLAIN = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"role": "assistant", "content": "a"}
SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}


@pytest.mark.parametrize("before", [[USER], [USER, SAID], []])
@pytest.mark.parametrize("after", [[USER], [SAID, USER], [USER, SAID, USER]])
@pytest.mark.parametrize(
    ("items", "names"),
    [([ENCRYPTED], "input[].encrypted_content"), ([SEARCHED], "input[web_search_call]"),
     ([ENCRYPTED, SEARCHED], "input[].encrypted_content, input[web_search_call]")],
)  # fmt: skip
def test_items_of_another_server_are_skipped_wherever_they_stand(
    http: httpx.Client,  # noqa: F811
    server: Any,
    before: Any,
    after: Any,
    items: Any,
    names: str,
) -> None:
    prompts = []
    for given in ([*before, *items, *after], [*before, *after]):
        answer = send(http, RESPONSES, input=given)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-ignored-params", "") == ("" if given == [*before, *after] else names)
        prompts.append(server.engine.submitted[-1].prompt_token_ids)
    assert prompts[0] == prompts[1]


def test_reasoning_that_led_to_nothing(http: httpx.Client) -> None:  # noqa: F811
    """A turn that was stopped: what the user says next is no answer to it."""
    answer = send(http, RESPONSES, input=[USER, PLAIN, USER])
    assert answer.status_code == 200 and answer.headers["x-ignored-params"] == "input[reasoning]"
    assert "x-ignored-params" not in send(http, RESPONSES, input=[USER, PLAIN, SAID, USER]).headers


def test_reasoning_stays_with_the_answer_after_it(make_server: Any) -> None:
    template = "{% for m in messages %}{{ m.role }}[{{ m.reasoning_content }}]{{ m.content }};{% endfor %}"
    server = make_server(engine_options={"template": template})
    with server.client() as client:
        assert send(client, RESPONSES, input=[USER, PLAIN, ENCRYPTED, SEARCHED, SAID, USER]).status_code == 200
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert "assistant[hm]a;" in prompt


@pytest.mark.parametrize("kind", ["custom_tool_call", "local_shell_call", "item_reference", "odd"])
def test_other_items_are_refused(http: httpx.Client, kind: str) -> None:  # noqa: F811
    check_error(send(http, RESPONSES, input=[USER, {"type": kind}, USER]), 400, "input[1].type")
