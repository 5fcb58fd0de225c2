"""Ollama's /api: conversations, prompts, vectors, what the model is; its streams, and hostile bodies."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from serve_fakes import ASSISTANT, MAX_MODEL_LEN, USER, reply_to
from test_http_hostile import check_error, http  # noqa: F401
from test_http_tools import CALL, hermes, shared_hermes  # noqa: F401

HI: Any = [{"role": "user", "content": "Hi"}]
PARAMETERS: Any = {"type": "object", "properties": {}}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def ask(http: httpx.Client, path: str, **fields: Any) -> Any:  # noqa: F811
    whole = {"stream": False} if path in ("chat", "generate") else {}
    answer = http.post(f"/api/{path}", json={"model": "fake", **whole, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(http: httpx.Client, path: str, **fields: Any) -> list[Any]:  # noqa: F811
    answer = http.post(f"/api/{path}", json={"model": "fake", **fields})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def shown_prompt(server: Any) -> str:
    return server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=True)


def test_a_chat_and_its_stream(http: httpx.Client, server: Any) -> None:  # noqa: F811
    server.engine.text = "Good day, ünïcode 🙂 to you."
    whole = ask(http, "chat", messages=HI)
    prompt = [USER, *server.llm.tokenizer.encode("user:Hi\n"), ASSISTANT]
    assert server.engine.submitted[-1].prompt_token_ids == prompt
    assert whole["message"] == {"role": "assistant", "content": server.engine.text}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("fake", True, "stop")
    assert whole["prompt_eval_count"] == len(prompt) and whole["eval_count"] > len(server.engine.text)
    assert whole.keys() >= COUNTS and all(isinstance(whole[name], int) for name in COUNTS)
    assert whole["total_duration"] >= whole["eval_duration"] + whole["prompt_eval_duration"] > 0
    parts = lines(http, "chat", messages=HI)
    assert "".join(part["message"]["content"] for part in parts) == server.engine.text
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 3
    assert parts[-1].keys() >= COUNTS and not parts[0].keys() & COUNTS
    assert parts[-1]["eval_count"] == whole["eval_count"]


def test_a_prompt_raw_or_through_the_template(http: httpx.Client, server: Any) -> None:  # noqa: F811
    encode = server.llm.tokenizer.encode
    found = ask(http, "generate", prompt="Hi", system="Be brief.", options={"num_predict": 5})
    assert shown_prompt(server) == "system:Be brief.\nuser:Hi\n"
    assert found["response"] == reply_to(server.engine.submitted[-1].prompt_token_ids)[:5]
    assert (found["done_reason"], found["eval_count"]) == ("length", 5) and "message" not in found
    raw = lines(http, "generate", prompt="Hi", raw=True, options={"num_predict": 5})
    assert server.engine.submitted[-1].prompt_token_ids == encode("Hi")
    assert "".join(part["response"] for part in raw) == reply_to(encode("Hi"))[:5]
    ask(http, "generate", prompt="Hi", raw=True, options={"num_predict": -1})
    assert server.engine.submitted[-1].max_tokens == MAX_MODEL_LEN - len(encode("Hi"))


def test_options_reach_the_sampler(http: httpx.Client, server: Any) -> None:  # noqa: F811
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "num_predict": 4, "num_ctx": 8192,
               "stop": ["x"], "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
               "repeat_last_n": -1, "num_gpu": 1, "use_mmap": True, "mirostat": 0, "typical_p": 1.0}  # fmt: skip
    for path, more in (
        ("chat", {"messages": HI}),
        ("generate", {"prompt": "x"}),
        ("generate", {"prompt": "x", "raw": True}),
    ):
        ask(http, path, options=options, keep_alive="5m", **more)
        params = server.engine.submitted[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
        assert (params.seed, params.max_tokens, params.stop) == (3, 4, ["x"])
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.5, -0.5)
    ask(http, "chat", messages=HI, options={"seed": -1, "repeat_penalty": 1.3, "repeat_last_n": 0, "num_predict": 1})
    assert server.engine.submitted[-1].params.seed is None
    assert server.engine.submitted[-1].params.repetition_penalty == 1.0


def test_a_format_is_enforced(http: httpx.Client, server: Any) -> None:  # noqa: F811
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        for path, more in (("chat", {"messages": HI}), ("generate", {"prompt": "x", "raw": True})):
            ask(http, path, format=form, options={"num_predict": 2}, **more)
            assert server.engine.submitted[-1].is_constrained
    ask(http, "chat", messages=HI, format="", options={"num_predict": 2})
    assert not server.engine.submitted[-1].is_constrained


def test_calls_and_results_without_ids(http: httpx.Client, server: Any) -> None:  # noqa: F811
    calls = [{"function": {"name": "add", "arguments": {"x": 2}}}, {"function": {"name": "mul", "arguments": {}}}]
    turns = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "thinking": "adding", "tool_calls": calls},
        {"role": "tool", "content": "6", "tool_name": "mul"},
        {"role": "tool", "content": "5"},
    ]
    ask(http, "chat", messages=turns, tools=[TOOL], options={"num_predict": 1})
    assert shown_prompt(server) == "tools:add,user:2 + 3?\nassistant:None\ntool:6\ntool:5\n"
    ask(http, "chat", messages=[*HI, {"role": "assistant", "content": "Good"}], options={"num_predict": 1})
    assert shown_prompt(server) == "user:Hi\nassistant:Good"


@pytest.mark.parametrize("n_tokens", [1, 7, 1000])
def test_thinking_text_and_calls(hermes: Any, n_tokens: int) -> None:  # noqa: F811
    hermes.engine.text, hermes.engine.tokens_a_step = f"<think>Hm.</think>Let me see.{CALL}{CALL}", n_tokens
    with hermes.client() as client:
        whole = ask(client, "chat", messages=HI, tools=[TOOL])["message"]
        parts = [part["message"] for part in lines(client, "chat", messages=HI, tools=[TOOL])]
    expected = [{"index": at, "name": "add", "arguments": {"a": 1, "b": "</tool_call>"}} for at in range(2)]
    streamed = [call for part in parts for call in part.get("tool_calls", [])]
    for calls in (whole["tool_calls"], streamed):
        assert [call["function"] for call in calls] == expected and len({call["id"] for call in calls}) == 2
    assert whole["thinking"] == "".join(part.get("thinking", "") for part in parts) == "Hm."
    assert whole["content"] == "".join(part["content"] for part in parts) == "Let me see."


def test_the_model_need_only_be_there(http: httpx.Client, server: Any) -> None:  # noqa: F811
    before = len(server.engine.submitted)
    assert ask(http, "chat", messages=[], keep_alive=0)["done_reason"] == "load"
    assert ask(http, "generate")["response"] == ""
    assert len(server.engine.submitted) == before


def test_names_with_and_without_the_tag(http: httpx.Client) -> None:  # noqa: F811
    for name in ("fake", "fake:latest", "fake-alias:latest"):
        assert ask(http, "chat", model=name, messages=HI, options={"num_predict": 1})["model"] == name
    for name in ("fake:7b", "other", "latest", ":latest"):
        error = http.post("/api/chat", json={"model": name, "messages": HI})
        check_error(error, (400, 404))


def test_vectors(http: httpx.Client, server: Any) -> None:  # noqa: F811
    ids = server.llm.tokenizer.encode("ab")
    found = ask(http, "embed", input=["ab", "c"])
    length = math.sqrt(ids[0] ** 2 + ids[1] ** 2 + 1)
    assert found["embeddings"][0] == pytest.approx([ids[0] / length, ids[1] / length, 1 / length])
    assert len(found["embeddings"]) == 2 and found["prompt_eval_count"] == 3
    assert ask(http, "embed", input="ab")["embeddings"] == found["embeddings"][:1]
    assert ask(http, "embed", input="ab", dimensions=1)["embeddings"] == [[1.0]]
    assert ask(http, "embeddings", prompt="ab") == {"embedding": [*ids, 1]}
    assert ask(http, "embed", input=[]) == {"model": "fake", "embeddings": []}
    ask(http, "embed", input="x" * (MAX_MODEL_LEN + 10))
    assert len(server.engine.submitted[-1].prompt_token_ids) == MAX_MODEL_LEN - 1
    long = {"model": "fake", "input": "x" * (MAX_MODEL_LEN + 10), "truncate": False}
    assert "input" in check_error(http.post("/api/embed", json=long), 400)["message"]


def test_what_the_model_is(http: httpx.Client) -> None:  # noqa: F811
    tags = http.get("/api/tags").json()["models"]
    assert [one["model"] for one in tags] == ["fake:latest", "fake-alias:latest"]
    assert all(len(one["digest"]) == 64 and one["modified_at"].endswith("Z") for one in tags)
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] == MAX_MODEL_LEN and running["name"] == "fake:latest"
    assert http.get("/api/version").json()["version"].count(".") == 2
    for body in ({"model": "fake"}, {"name": "fake:latest", "verbose": True}):
        found = http.post("/api/show", json=body).json()
        assert found["capabilities"] == ["completion"]
        family = found["model_info"]["general.architecture"]
        assert found["model_info"][f"{family}.context_length"] == MAX_MODEL_LEN
        assert found["model_info"][f"{family}.embedding_length"] == 3
    check_error(http.post("/api/show", json={"model": "other"}), 404)
    check_error(http.post("/api/show", json={}), 400)


def test_what_curl_sends_is_read(http: httpx.Client) -> None:  # noqa: F811
    body = json.dumps({"model": "fake", "messages": HI, "stream": False, "options": {"num_predict": 1}})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post("/api/chat", content=body, headers=form).status_code == 200
    assert http.post("/v1/chat/completions", content=body, headers=form).status_code == 415
    page = {**form, "origin": "https://evil.example"}
    check_error(http.post("/api/chat", content=body, headers=page), 403)


def test_a_stream_that_fails_says_so_in_its_last_line(http: httpx.Client, server: Any) -> None:  # noqa: F811
    server.engine.fault = lambda request: True
    parts = lines(http, "chat", messages=HI)
    assert parts[-1].keys() == {"error"} and "engine failed" in parts[-1]["error"]
    assert all(part["done"] is False for part in parts[:-1])
    check_error(http.post("/api/chat", json={"model": "fake", "messages": HI, "stream": False}), 500)


def test_silence_is_filled_with_lines(make_server: Any) -> None:
    server = make_server(sse_keep_alive=0.02)
    server.engine.delay_s = 0.2
    with server.client() as client:
        for path, more in (("chat", {"messages": HI}), ("generate", {"prompt": "x"})):
            parts = lines(client, path, options={"num_predict": 2}, **more)
            assert len(parts) > 4 and [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]


def option(**fields: Any) -> dict[str, Any]:
    return {"options": fields}


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


XML = "format = 'xml' is not allowed: it must be \"json\" or a JSON schema"
CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    (option(temperature=-1), "options.temperature"), (option(temperature="hot"), "options.temperature"),
    (option(top_p=2), "options.top_p"), (option(top_k=-5), "options.top_k"), (option(min_p=2), "options.min_p"),
    (option(seed=2**64), "options.seed"), (option(num_predict=-3), "options.num_predict"),
    (option(stop=[""]), "options.stop"),
    (option(stop=["x"] * 65), "options.stop"), (option(repeat_penalty=0), "options.repeat_penalty"),
    (option(presence_penalty=3), "options.presence_penalty"), (option(mirostat=2), "options.mirostat"),
    (option(typical_p=0.5), "options.typical_p"), (option(tfs_z=0.5), "options.tfs_z"),
    (option(repeat_penalty=1.2, repeat_last_n=64), "options.repeat_last_n"), (option(num_ctx=-1), "options.num_ctx"),
    (option(embedding_only=True), "options.embedding_only"),
    ({"options": 5}, "options"), ({"format": "xml"}, XML), ({"format": 5}, "format"),
    ({"format": {"type": "hiccup"}}, "format"), ({"think": True}, "think"), ({"think": "hard"}, "think"),
    ({"logprobs": True}, "logprobs"), ({"messages": "x"}, "messages"), ({"keep_alive": []}, "keep_alive"),
    ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"), (turn(role="robot"), "messages[0].role"),
    (turn(content=""), "messages[0]"), (turn(images=["aGk="]), "messages[0].images"),
    (turn(role="tool"), "messages[0]"), (turn(content=5), "messages[0].content"),
    (turn(content="x" * 500_000), "messages"),
    (turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "messages[0].tool_calls[0]"),
    (turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": {}}}] * 200), "messages[0].tool_calls"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"), ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"stream": "yes"}, "stream"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), CHAT_REFUSED, ids=[f"{row[1]}-{i}" for i, row in enumerate(CHAT_REFUSED)])
def test_a_chat_is_refused_in_the_clients_words(http: httpx.Client, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    for stream in ({}, {"stream": False}):
        answer = http.post("/api/chat", json={"model": "fake", "messages": HI, **stream, **fields})
        assert param in check_error(answer, 400)["message"]


def test_what_does_no_harm_is_let_through_and_named(http: httpx.Client) -> None:  # noqa: F811
    fields = {**option(wings=2, num_predict=10**6), "tools": [{"type": "web", "function": {"name": "f"}}]}
    answer = http.post("/api/chat", json={"model": "fake", "messages": HI, "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    assert {"options.wings", "tools[other]"} <= set(answer.headers["x-ignored-params"].split(", "))
    assert answer.headers["x-max-tokens-requested"] == str(10**6)
    for name in ("wings", "flaps"):
        strict = http.post(
            "/api/chat", json={"model": "fake", "messages": HI, **option(**{name: 2})}, headers={"x-strict": "1"}
        )
        assert f"options.{name}" in check_error(strict, 400)["message"]


GENERATE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "x"}, "suffix"), ({"template": "{{ .Prompt }}"}, "template"), ({"context": [1, 2]}, "context"),
    ({"images": ["aGk="]}, "images"), ({"raw": True, "system": "x"}, "system"), ({"raw": True, "think": True}, "think"),
    ({"width": 64}, "width"), ({"prompt": 5}, "prompt"), ({"prompt": "x" * 500_000}, "prompt"),
    ({"prompt": "x" * 5000, "raw": True}, "prompt"), ({"prompt": "x" * 5000}, "prompt"),
    (option(num_predict=-3) | {"raw": True}, "options.num_predict"),
    (option(top_p=2) | {"raw": True}, "options.top_p"),
    ({"format": {"type": "hiccup"}, "raw": True}, "format"), ({"top_logprobs": 3}, "top_logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param"), GENERATE_REFUSED, ids=[f"{row[1]}-{i}" for i, row in enumerate(GENERATE_REFUSED)]
)
def test_a_prompt_is_refused_in_the_clients_words(http: httpx.Client, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    answer = http.post("/api/generate", json={"model": "fake", "prompt": "x", **fields})
    assert param in check_error(answer, 400)["message"]


VECTORS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": ["a", ""]}, "input"), ({"input": [1]}, "input"), ({"input": ["x"] * 1025}, "input"),
    ({"input": "x" * 500_000}, "input"), ({"dimensions": 0}, "dimensions"), ({"dimensions": 4}, "dimensions"),
    ({"truncate": "no"}, "truncate"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), VECTORS_REFUSED, ids=[str(i) for i in range(len(VECTORS_REFUSED))])
def test_vectors_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    answer = http.post("/api/embed", json={"model": "fake", "input": "x", **fields})
    assert param in check_error(answer, 400)["message"]


def test_null_is_the_same_as_nothing(http: httpx.Client) -> None:  # noqa: F811
    from quire.serve.ollama import schema

    needed = {"chat": {"messages": HI}, "generate": {"prompt": "x"}, "embed": {"input": "x"}, "show": {}}
    kinds = {"chat": schema.OllamaChatRequest, "generate": schema.OllamaGenerateRequest,
             "embed": schema.OllamaEmbedRequest, "show": schema.OllamaShowRequest}  # fmt: skip
    for path, kind in kinds.items():
        nulls = dict.fromkeys(kind.__struct_fields__)
        answer = http.post(f"/api/{path}", json={**nulls, "model": "fake", **needed[path]})
        assert answer.status_code == 200, answer.text
