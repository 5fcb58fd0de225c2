"""What becomes of request fields that are not honoured: ignored and named where they do no harm, refused by name where
they would change the answer; strict requests and servers refuse both."""

from __future__ import annotations

import json
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serve_fakes import MAX_MODEL_LEN
from test_http_hostile import check_error, http  # noqa: F401
from test_http_tools import hermes, shared_hermes  # noqa: F401

from quire.serve.http.ignored import MAX_LOGGED, MAX_NAMES, IgnoredLog, IgnoredParams, escaped
from quire.serve.openai.refused_fields import BATCHES, EMBEDDING, GENERATING, PROMPTING, SAMPLING

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT, EMBEDDINGS = "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"
API = pathlib.Path(__file__).resolve().parents[3] / "docs" / "api.md"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3},
    TEXT: {"prompt": "Hi", "max_tokens": 3},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3},
    MESSAGES: {"messages": HI, "max_tokens": 3},
    COUNT: {"messages": HI},
    EMBEDDINGS: {"input": "Hi"},
    "/tokenize": {"messages": HI},
}
SEARCH = {"type": "web_search", "search_context_size": "low"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
SAID = {"role": "assistant", "content": "a", "id": "m", "provider_specific_fields": {}, "reasoning": {"effort": 1}}

IGNORED: list[tuple[str, dict[str, Any], str]] = [
    # describes the caller
    (CHAT, {"client_metadata": {"a": 1}, "metadata": {"n": 5}}, "client_metadata, metadata"),
    (CHAT, {"prompt_cache_key": "k", "service_tier": "flex", "store": False}, "prompt_cache_key, service_tier, store"),
    (CHAT, {"provider": {"order": []}, "transforms": ["x"], "extra_body": {}}, "provider, transforms, extra_body"),
    (TEXT, {"metadata": {}, "request_id": "x"}, "metadata, request_id"),
    (RESPONSES, {"client_metadata": {}, "prompt_cache_key": "k", "store": False},
     "client_metadata, prompt_cache_key, store"),
    (MESSAGES, {"service_tier": "auto", "metadata": {"team": "x"}, "betas": ["b"]},
     "service_tier, metadata.team, betas"),
    (MESSAGES, {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
     "system[].cache_control"),
    (COUNT, {"cache_control": {"type": "ephemeral"}, "max_tokens": 5}, "cache_control, max_tokens"),
    (EMBEDDINGS, {"input_kind": "query", "user_id": 5}, "input_kind, user_id"),
    ("/tokenize", {"temperature": 2, "who": "me"}, "temperature, who"),
    # asks for nothing
    (CHAT, {"functions": [], "function_call": "auto", "modalities": ["text"]}, "functions, function_call, modalities"),
    (CHAT, {"length_penalty": 1.0, "use_beam_search": False, "early_stopping": True, "verbosity": "medium"},
     "early_stopping, verbosity"),
    (RESPONSES, {"length_penalty": 1.0, "use_beam_search": False, "early_stopping": True},
     "length_penalty, use_beam_search, early_stopping"),
    (CHAT, {"best_of": 1, "echo": False, "suffix": "", "min_new_tokens": 0}, "best_of, echo, suffix, min_new_tokens"),
    (CHAT, {"tools": [], "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (RESPONSES, {"truncation": "auto", "n": 1, "background": False}, "truncation, n, background"),
    (RESPONSES, {"context_management": [], "text": {"verbosity": "medium"}}, "context_management, text.verbosity"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
     "context_management"),
    (COUNT, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    (MESSAGES, {"mcp_servers": [], "container": ""}, "mcp_servers, container"),
    # asks for an extra
    (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include"),
    (RESPONSES, {"reasoning": {"summary": "detailed"}, "max_tool_calls": 3}, "reasoning.summary, max_tool_calls"),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "include": ["x"]}, "prediction, include"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    # inside of messages
    (CHAT, {"messages": [{**HI[0], "id": 1, "thread": "t"}, SAID, *HI]},
     "messages[].id, messages[].thread, messages[].provider_specific_fields, messages[].reasoning"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
     "messages[].content[].cache_control"),
    (RESPONSES, {"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[].extra"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "parsed_output": 1}]}]},
     "messages[].content[].parsed_output"),
    # tools that a server would run
    (CHAT, {"tools": [SEARCH], "tool_choice": "auto"}, "tools[].search_context_size, tool_choice, tools[web_search]"),
    (CHAT, {"tools": [{"type": "web_search_preview_2025_03_11"}, FUNCTION]}, "tools[web_search_preview]"),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": []}, {"type": "odd,\r\nx"}]},
     "tools[].tools, tools[namespace], tools[other]"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]},
     "tools[].max_uses, tools[web_search]"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}]},
     "tools[].defer_loading"),
    # variables that the template has not
    (CHAT, {"chat_template_kwargs": {"mood": "glad", "enable_thinking": False}},
     "chat_template_kwargs.enable_thinking"),
]  # fmt: skip

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"store": True}, "store"), (CHAT, {"suffix": "x"}, "suffix"), (CHAT, {"echo": True}, "echo"),
    (CHAT, {"repeat_penalty": 1.2}, "repeat_penalty"), (CHAT, {"do_sample": False}, "do_sample"),
    (CHAT, {"max_output_tokens": 5}, "max_output_tokens"), (CHAT, {"instructions": "x"}, "instructions"),
    (CHAT, {"reasoning": {"effort": "high"}}, "reasoning"), (CHAT, {"enable_thinking": False}, "enable_thinking"),
    (CHAT, {"messages": [{**HI[0], "images": ["x"]}]}, "messages[0].images"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    (CHAT, {"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"length_penalty": 0}, "length_penalty"), (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (TEXT, {"messages": HI}, "messages"), (TEXT, {"tools": [FUNCTION]}, "tools"), (TEXT, {"best_of": 0}, "best_of"),
    (CHAT, {"best_of": 2}, "best_of"),
    (RESPONSES, {"frequency_penalty": 0.5}, "frequency_penalty"), (RESPONSES, {"stop": "x"}, "stop"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (MESSAGES, {"seed": 5}, "seed"), (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    (COUNT, {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    (EMBEDDINGS, {"input_type": "query"}, "input_type"), (EMBEDDINGS, {"stream": True}, "stream"),
    (EMBEDDINGS, {"dimensions": 0}, "dimensions"), (EMBEDDINGS, {"dimensions": 4}, "dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regx": "a"}, "structured_outputs.regx is not known; did you mean regex?"),
        ({"regx": "a", "json_object": True}, "structured_outputs.regx is not known; did you mean regex?"),
        ({"colour": "red"}, "structured_outputs.colour is not known; known are begins_after, "),
    ],
)
def test_no_part_of_a_constraint_is_ignored(http: httpx.Client, fields: dict[str, Any], words: str) -> None:  # noqa: F811
    for path in (CHAT, TEXT):
        error = http.post(path, json=body_of(path, {"structured_outputs": fields})).json()["error"]
        assert (error["param"], error["code"]) == ("structured_outputs", "unknown_parameter")
        assert error["message"].startswith(words)
    off = {"json_object": True, "disable_fallback": False}
    answer = http.post(CHAT, json=body_of(CHAT, {"structured_outputs": off}))
    assert answer.status_code == 200 and named(answer) == "structured_outputs.disable_fallback"


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "fake", **GOOD[path], **fields}


def named(answer: httpx.Response) -> str:
    return answer.headers.get("x-ignored-params", "")


@pytest.mark.parametrize(("path", "fields", "names"), IGNORED, ids=[f"{row[2][:30]}-{row[0]}" for row in IGNORED])
def test_what_does_no_harm_is_let_through(
    http: httpx.Client,  # noqa: F811
    server: Any,
    path: str,
    fields: dict[str, Any],
    names: str,
) -> None:
    n_before = len(server.engine.submitted)
    answer = http.post(path, json=body_of(path, fields))
    assert answer.status_code == 200, answer.text
    assert sorted(named(answer).split(", ")) == sorted(names.split(", "))
    n_taken = len(server.engine.submitted)
    assert n_taken - n_before == (path not in (COUNT, "/tokenize"))
    for strict in ("1", "true"):
        error = check_error(http.post(path, json=body_of(path, fields), headers={"X-Strict": strict}), 400)
        assert re.sub(r"\[\d+\]", "[]", error.get("param") or "") in ["", *names.split(", ")]
    assert len(server.engine.submitted) == n_taken


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[f"{row[2]}-{row[0]}" for row in REFUSED])
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client,  # noqa: F811
    path: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    message = check_error(http.post(path, json=body_of(path, fields)), 400, param)["message"]
    if path == CHAT and param in ("best_of", "echo"):
        assert message == f"{param} is not supported: it is a field of /v1/completions, not of this path."


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
def test_every_refused_field_may_be_null(http: httpx.Client, path: str) -> None:  # noqa: F811
    names = {name for name in GENERATING if "." not in name} - GOOD[path].keys()
    answer = http.post(path, json=body_of(path, dict.fromkeys(names)))
    assert answer.status_code == 200 and named(answer) == ""
    assert http.post(path, json=body_of(path, dict.fromkeys(names)), headers={"x-strict": "1"}).status_code == 200


def test_what_is_honoured_is_not_listed(http: httpx.Client) -> None:  # noqa: F811
    fields = {"user": "u", "safety_identifier": "s", "chat_template_kwargs": {"mood": "glad"}, "seed": None}
    assert named(http.post(CHAT, json=body_of(CHAT, fields))) == ""
    said = http.post(RESPONSES, json=body_of(RESPONSES, {"metadata": {"a": "b"}}))
    assert said.json()["metadata"] == {"a": "b"} and named(said) == ""


def test_a_strict_server(make_server: Callable[..., Any]) -> None:
    with make_server(strict=True).client() as client:
        for headers in ({}, {"x-strict": "0"}):
            check_error(client.post(CHAT, json=body_of(CHAT, {"metadata": {}}), headers=headers), 400, "metadata")
        answer = client.post(CHAT, json=body_of(CHAT, {"max_tokens": MAX_MODEL_LEN}))
        assert check_error(answer, 400)["code"] == "context_length_exceeded"
        assert client.post(CHAT, json=body_of(CHAT, {})).status_code == 200


def test_the_words_of_the_header(http: httpx.Client) -> None:  # noqa: F811
    """Nobody who asks for strictness goes without it: a word that says neither is refused."""
    for value, status in [*((word, 400) for word in ("1", "true", "yes", "on", "ON", "True")),
                          *((word, 200) for word in ("0", "false", "no", "Off", ""))]:  # fmt: skip
        answer = http.post(CHAT, json=body_of(CHAT, {"metadata": {}}), headers={"X-Strict": value})
        assert answer.status_code == status, value
        assert ("metadata" in answer.text) == (status == 400)
    for value in ("maybe", "2", "1, 1", "ja", "\xff"):
        for headers in ([("x-strict", value)], [("x-strict", "1"), ("x-strict", value)]):
            sent = [(name.encode(), one.encode("latin-1")) for name, one in headers]
            message = check_error(http.post(CHAT, json=body_of(CHAT, {}), headers=sent), 400)["message"]
            assert "1, true, yes or on, or 0, false, no, off or empty" in message and message.count("X-Strict = ") == 1


def test_ten_thousand_names(http: httpx.Client, server: Any, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    """Header, log and metric are bounded, and no value is in them."""
    n_series = http.get("/metrics").text.count("quire:ignored_params_total{")
    with caplog.at_level(logging.WARNING, "quire.serve"):
        for _ in range(2):
            fields = {f"name-{i}-of-many": f"secret {i}" for i in range(10_000)}
            answer = http.post(CHAT, json=body_of(CHAT, fields))
            assert answer.status_code == 200
            assert named(answer).endswith(f", +{10_000 - MAX_NAMES} more") and len(named(answer)) < 1200
    lines = [record.getMessage() for record in caplog.records if "name-" in record.getMessage()]
    assert len(lines) == MAX_NAMES and "secret" not in "".join(lines) + named(answer)
    page = http.get("/metrics").text
    assert page.count("quire:ignored_params_total{") <= n_series + 1 and "name-" not in page
    counted = re.search(r'quire:ignored_params_total\{param="other"\} (\S+)', page)
    assert counted is not None and float(counted.group(1)) >= 20_000


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log = IgnoredLog()
    with caplog.at_level(logging.WARNING, "quire.serve"):
        for i in range(3 * MAX_LOGGED):
            ignored = IgnoredParams()
            ignored.note(f"n{i}")
            log.take(ignored)
            log.take(ignored)
    assert len(caplog.records) == MAX_LOGGED + 1


@pytest.mark.parametrize(
    "name",
    ["a b", "a,b", "a\r\nx-evil: 1", "ünï", "\x00", "k" * 1_000_000, "a" * 64 + "\U0001f600" * 99, '"', "\ud800"],
)
def test_names_are_safe_in_headers(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_.~$%\[\]-]{1,65}", escaped(name))


def test_names_are_safe_on_the_wire(http: httpx.Client) -> None:  # noqa: F811
    answer = http.post(CHAT, json=body_of(CHAT, {"a\r\nx-evil: 1": 1, "b, c": 2, "": 3}))
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    assert named(answer).startswith("a%0D%0Ax-evil%3A%201, b%2C%20c")


def test_long_histories_with_names_of_their_own(http: httpx.Client) -> None:  # noqa: F811
    turn = [{"role": "user", "content": "x", "id": "u"}, {"role": "assistant", "content": "y", "id": "a"}]
    answer = http.post("/tokenize", json={"model": "fake", "messages": [*turn * 200, *HI]})
    assert answer.status_code == 200 and named(answer) == "messages[].id"


def test_values_stay_as_they_came(http: httpx.Client, server: Any) -> None:  # noqa: F811
    """A filtered body gives the request that the body without the unknown fields gives, byte for byte."""
    odd = b'"content": "\\u00fc \\n\\ud83d\\ude00 \\"x\\"", "role": "user"'
    rest = b'"temperature": 1e-1, "seed": 9007199254740993, "max_tokens": 2'
    plain = b'{"model": "fake", "messages": [{%b}], %b}' % (odd, rest)
    more = plain.replace(b'"role"', b'"id": {"a": [1, "}"]}, "role"').replace(b'"seed"', b'"x": [{"seed": 1}], "seed"')
    answers = [http.post(CHAT, content=one, headers={"content-type": "application/json"}) for one in (plain, more)]
    first, second = server.engine.submitted[-2:]
    assert [answer.status_code for answer in answers] == [200, 200] and named(answers[1]) == "messages[].id, x"
    assert first.params == second.params and first.prompt_token_ids == second.prompt_token_ids
    assert first.params.seed == 9007199254740993


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES])
def test_max_tokens_is_cut_to_the_context(http: httpx.Client, server: Any, path: str) -> None:  # noqa: F811
    server.engine.tokens_a_step = 1000
    answer = http.post(path, json=body_of(path, {"max_tokens": 10**6}))
    assert answer.status_code == 200
    room = MAX_MODEL_LEN - len(server.engine.submitted[-1].prompt_token_ids)
    assert server.engine.submitted[-1].max_tokens == room
    assert (answer.headers["x-max-tokens-requested"], answer.headers["x-max-tokens"]) == ("1000000", str(room))
    strict = http.post(path, json=body_of(path, {"max_tokens": 10**6}), headers={"x-strict": "1"})
    assert "context" in check_error(strict, 400)["message"]
    assert "x-max-tokens" not in http.post(path, json=body_of(path, {"max_tokens": 5})).headers


def test_each_prompt_has_its_own_room(http: httpx.Client, server: Any) -> None:  # noqa: F811
    server.engine.tokens_a_step = 1000
    answer = http.post(TEXT, json={"model": "fake", "prompt": [[1] * 10, [1] * 4000], "max_tokens": 4090})
    assert [one.max_tokens for one in server.engine.submitted[-2:]] == [MAX_MODEL_LEN - 10, 96]
    assert answer.headers["x-max-tokens"] == "96" and answer.json()["usage"]["completion_tokens"] == MAX_MODEL_LEN + 86


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_continuous_usage_stats(http: httpx.Client, path: str) -> None:  # noqa: F811
    both = {"include_usage": True, "continuous_usage_stats": True}
    answer = http.post(path, json=body_of(path, {"stream": True, "n": 2, "max_tokens": 4, "stream_options": both}))
    chunks = chunks_of(answer)
    for index in (0, 1):
        of_one = [one["usage"] for one in chunks if one["choices"] and one["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in of_one]
        assert counts == sorted(counts) and counts[-1] == 4 and set(counts) >= {1, 2, 3, 4}
        assert counts[0] == (0 if path == CHAT else 1)
        assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in of_one)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8
    alone = {"continuous_usage_stats": True}
    answer = http.post(path, json=body_of(path, {"stream": True, "stream_options": alone}))
    assert named(answer) == "stream_options.continuous_usage_stats"
    assert not any(chunk.get("usage") for chunk in chunks_of(answer))


def test_dimensions(http: httpx.Client) -> None:  # noqa: F811
    """Matryoshka: the first of them, made as long as 1 again."""
    whole = http.post(EMBEDDINGS, json=body_of(EMBEDDINGS, {"normalize": False})).json()["data"][0]["embedding"]
    assert len(whole) == 3
    for normalize in (True, False):
        fields = {"dimensions": 2, "normalize": normalize}
        found = http.post(EMBEDDINGS, json=body_of(EMBEDDINGS, fields)).json()["data"][0]["embedding"]
        length = sum(x * x for x in whole[:2]) ** 0.5 if normalize else 1.0
        assert found == pytest.approx([x / length for x in whole[:2]])


def test_reasoning_has_both_names(hermes: Any) -> None:  # noqa: F811
    hermes.engine.text = "<think>hm</think>yes"
    with hermes.client() as client:
        body = {"model": "fake", "messages": HI, "max_tokens": 40}
        message = client.post(CHAT, json=body).json()["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "hm" and message["content"] == "yes"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(client.post(CHAT, json={**body, "stream": True}))]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == "hm"


def test_reasoning_comes_back_under_either_name(make_server: Callable[..., Any]) -> None:
    template = "{% for m in messages %}{{ m.role }}[{{ m.reasoning_content }}]{{ m.content }};{% endfor %}"
    server = make_server(engine_options={"template": template})
    prompts = set()
    with server.client() as client:
        for name in ("reasoning", "reasoning_content"):
            turns = [*HI, {"role": "assistant", "content": "a", name: "because"}, *HI]
            answer = client.post(CHAT, json={"model": "fake", "messages": turns, "max_tokens": 1})
            assert answer.status_code == 200 and named(answer) == ""
            prompts.add(bytes(server.engine.submitted[-1].prompt_token_ids))
    assert len(prompts) == 1 and server.llm.tokenizer.decode(list(prompts.pop())).count("[because]") == 1


BUDGETS: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"thinking_token_budget": 7}, 7),
    (CHAT, {"thinking": {"type": "adaptive", "budget_tokens": 9}}, 9),
    (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 1024}}, 1024),
]


@pytest.mark.parametrize(("path", "fields", "budget"), BUDGETS)
def test_a_budget_reaches_the_engine(hermes: Any, path: str, fields: dict[str, Any], budget: int) -> None:  # noqa: F811
    """What the engine does with it: tests/null/text/test_leading.py, tests/cpu/engine/test_constrained.py."""
    with hermes.client() as client:
        answer = client.post(path, json=body_of(path, fields))
        assert answer.status_code == 200 and named(answer) == ""
        constraint = hermes.engine.submitted[-1].params.structured_outputs
        assert (constraint.begins_within, constraint.begins_after, constraint.kind) == (budget, "</think>", "free")
        shape = {"response_format": {"type": "json_object"}} if path == CHAT else {}
        client.post(path, json=body_of(path, {**fields, **shape}))
        assert hermes.engine.submitted[-1].params.structured_outputs.kind == ("json_object" if shape else "free")
        wrong = {"thinking_token_budget": 5, "thinking": {"type": "adaptive", "budget_tokens": 9}}
        check_error(client.post(CHAT, json=body_of(CHAT, wrong)), 400, "thinking")


def test_batch_lines_are_read_alike(make_server: Callable[..., Any], tmp_path: Any) -> None:
    from quire.core.errors import QuireError
    from quire.serve.batch.lines import read_line
    from quire.serve.http.refusal import Refusal

    line = json.dumps({"custom_id": "a", "url": CHAT, "body": body_of(CHAT, {"x": 1}), "note": "mine"}).encode()
    ignored = IgnoredParams()
    read = read_line(line, 10_000, ignored)
    assert list(ignored.names) == ["note"] and json.loads(read.body)["x"] == 1, "the body is its endpoint's to judge"
    strict = IgnoredParams()
    strict.is_strict = True
    with pytest.raises((Refusal, QuireError)):
        read_line(line, 10_000, strict)


def test_the_document_names_every_refused_field_with_its_reason() -> None:
    rows = [line.split("|") for line in API.read_text().splitlines() if line.startswith("| `")]
    said = {(name, row[2].strip()) for row in rows for name in re.findall(r"`([\w.]+)`", row[1])}
    tables: list[dict[str, Any]] = [dict(table) for table in (PROMPTING, SAMPLING, EMBEDDING, BATCHES)]
    missing = {(name, field.why) for table in tables for name, field in table.items()} - said
    assert not missing


def test_a_mistyped_field_is_guessed_at(http: httpx.Client) -> None:  # noqa: F811
    fields = {"temprature": 0.5, "messages": [{**HI[0], "contnet": "x"}]}
    answer = http.post(CHAT, json=body_of(CHAT, fields))
    assert answer.headers["x-ignored-params"] == "messages[].contnet, temprature", "names alone"
    strict = http.post(CHAT, json=body_of(CHAT, {"temprature": 0.5}), headers={"x-strict": "1"})
    assert "did you mean temperature?" in check_error(strict, 400, "temprature")["message"]


def test_the_log_guesses_too_and_leaves_what_is_known_alone(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredParams()
    for name in ("temprature", "metadata", "zzz"):
        ignored.note_member("", name, {"temperature": None, "metadatas": None})
    with caplog.at_level(logging.WARNING, "quire.serve"):
        IgnoredLog().take(ignored)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "temprature is ignored (did you mean temperature?) (said once" in first
    assert "did you mean" not in second + third
