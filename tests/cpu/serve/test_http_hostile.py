"""Hostile requests, table by table: JSON bodies (J), sampling (S), prompts (P), keys (H15, I07), bodies' limits (H)."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_bodies import CHAT, JSON_HEADERS, TEXT, check_error, is_anthropic, valid
from serve_fakes import LOGITS_WIDTH, MAX_MODEL_LEN, reply_to

from quire.core.failure import Code, Failure
from quire.serve.app import OPEN_PATHS, ROUTES
from quire.serve.openai.schema import ChatRequest, CompletionRequest
from quire.serve.page.assets import FILES

NO_JSON = {"/v1/files", "/v1/batches/{batch_id}/cancel", "/ping", "/reset_prefix_cache", "/sleep", "/wake_up"}
"""Routes that take a form, or nothing."""
POSTS = [path for method, path, _ in ROUTES if method == "POST" and path not in NO_JSON]
ALL_PATHS = sorted({re.sub(r"{.*?}", "fake", path) for _, path, _ in ROUTES} | set(FILES))


@pytest.fixture
def http(server: Any) -> Any:
    """A client; afterwards the server is healthy, a canary has its golden text, and nothing runs."""
    with server.client() as client:
        yield client
        assert client.get("/health").status_code == 200
        client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})  # which a good body may have loaded
        server.engine.fault, server.engine.held, server.engine.text = (lambda request: False), False, None
        canary = client.post(TEXT, json={"model": "fake", "prompt": "canary", "max_tokens": 8}).json()
        assert canary["choices"][0]["text"] == reply_to(server.llm.tokenizer.encode("canary"))[:8]
        assert not server.engine.running and not server.state.live and not server.llm._streams


# ---- keys


@pytest.fixture(scope="module")
def locked() -> Any:
    from live_server import LiveServer

    from quire.serve.config import ServerConfig

    config = ServerConfig(port=0, api_key="sésame".encode().hex())
    config.verify()
    server = LiveServer(config).start()
    yield server
    server.stop()


WRONG_KEYS: list[list[tuple[bytes, bytes]]] = [
    [],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", b"Basic 73c3a973616d65")],
    [(b"authorization", "Bearer sésame".encode())],
    [(b"authorization", b"Bearer " + b"k" * 20_000)],
    [(b"x-api-key", b"73c3a973616d65"), (b"authorization", b"Bearer wrong")],
    [(b"x-api-key", b"73c3a973616d65"), (b"x-api-key", b"73c3a973616d65")],
    [(b"x-api-key", b"73c3a973616d65")],
]
"""The last one is right for Anthropic's paths."""


@pytest.mark.parametrize(
    "path",
    [*ALL_PATHS, "/nothing", "/v1/models/../models", "//v1/models", "/health/", "/%68ealth", "/health%2f", "/;x"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_every_route_needs_the_key(locked: Any, path: str, method: str) -> None:
    with httpx.Client(base_url=locked.base, timeout=60) as client:
        if path in OPEN_PATHS:
            assert client.request(method, path).status_code in (200, 405)
            return
        for headers in WRONG_KEYS:
            answer = client.request(method, httpx.URL(locked.base + path), headers=headers)
            if is_anthropic(path) and headers == WRONG_KEYS[-1]:
                assert answer.status_code != 401, "Anthropic's clients send their key this way"
                continue
            error = check_error(answer, 401)
            assert error.get("code", "invalid_api_key") == "invalid_api_key"
        key = locked.config.api_key.encode()
        duplicate = [(b"authorization", b"Bearer " + key)] * 2
        assert client.request(method, path, headers=duplicate).status_code == 401
        assert client.request(method, path, headers=duplicate[:1]).status_code != 401


def test_the_right_key_serves_and_is_in_no_repr(locked: Any) -> None:
    with locked.client() as client:
        assert client.post(TEXT, json=valid(TEXT)).status_code == 200
    assert locked.config.api_key not in repr(locked.config)


# ---- routes


@pytest.mark.parametrize("path", sorted({path for _, path, _ in ROUTES}))
def test_wrong_methods(http: Any, path: str) -> None:
    allowed = {method for method, other, _ in ROUTES if other == path}
    for wrong in {"GET", "POST", "PUT", "DELETE", "PATCH"} - allowed:
        answer = http.request(wrong, re.sub(r"{.*?}", "fake", path), json={})
        check_error(answer, 405)
        assert allowed <= {method.strip() for method in answer.headers["allow"].split(",")}


def test_every_route_is_in_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text()
    for method, path, _ in ROUTES:
        written = path.replace(":path", "")
        lines = [line for line in page.splitlines() if line.startswith(f"| {method} |")]
        assert any(f"`{written}`" in line for line in lines), f"docs/api.md does not list {method} {written}"


def test_unknown_paths(http: Any) -> None:
    for path in ("/v2", "/v1/chat/completions/", "/page/../config.py", "/page/quire.py", "/%2e%2e/etc/passwd", "/docs"):
        check_error(http.get(path), 404)


# ---- JSON bodies

BAD_BODIES = {
    "empty": b"",
    "blank": b"  \n",
    "truncated": b'{"model": "fake", "prompt": "x',
    "array": b"[]",
    "string": b'"x"',
    "number": b"1",
    "null": b"null",
    "nested": b"[" * 100_000,
    "nested object": b'{"a":' * 100_000,
    "nested value": b'{"model": "fake", "metadata": ' + b"[" * 100_000,
    "nested tools": b'{"model":"fake","tools":[{"type":"function","function":{"name":"a","parameters":{"a":'
    + b"[" * 10**5,
    "unknown keys": b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
    "long key": b'{"' + b"k" * 10_000_000 + b'": 1}',
    "not utf-8": b'{"model": "\xff\xfe"}',
    "utf-16": '{"model": "fake"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"model": "fake"}',
    "lone surrogate": b'{"model": "\\ud800"}',
    "nan": b'{"model": "fake", "prompt": "x", "messages": [{"role":"user","content":"x"}], "temperature": NaN}',
    "infinity": b'{"model": "fake", "prompt": "x", "messages": [{"role":"user","content":"x"}], "top_p": Infinity}',
    "minus infinity": b'{"model": "fake", "prompt": "x", "messages": [], "min_p": -Infinity}',
    "1e999": b'{"model": "fake", "prompt": "x", "messages": [{"role":"user","content":"x"}], "temperature": 1e999}',
    "two values": b"{} {}",
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_json(server: Any, path: str, name: str) -> None:
    body = BAD_BODIES[name]
    if path.startswith("/api/"):  # Ollama's: numbers are options there, and what is unknown is not read
        body = body.replace(b'"temperature": 1e999', b'"model": 1e999')
    with server.client() as client:
        answer = client.post(path, content=body, headers=JSON_HEADERS)
        check_error(answer, 400)
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", POSTS)
def test_media_types(http: Any, path: str) -> None:
    body = json.dumps(valid(path)).encode()
    for media in (
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
        "application/jsonx",
        "",
    ):
        check_error(http.post(path, content=body, headers={"content-type": media}), 415)
    check_error(http.post(path, content=body, headers={**JSON_HEADERS, "content-encoding": "gzip"}), 415)
    for media in ("application/json", "application/json;charset=utf-8", 'Application/JSON; charset="UTF-8"'):
        good = (
            404 if path in ("/v1/batches", "/v1/unload_lora_adapter") else 200
        )  # there is no such file, no such adapter
        assert http.post(path, content=body, headers={"content-type": media}).status_code == good


def kinds_of(annotation: str) -> set[str]:
    parts = {part.strip().split("[")[0] for part in annotation.split("|")}
    others = {"JsonObject": "dict", "StreamOptions": "dict", "Thinking": "dict", "None": "NoneType"}
    return {others.get(part, part) for part in parts}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "0.7", "temperature = '0.7': Expected float, got str."),
        ("seed", 1e30, "seed = 1e+30: Expected int, got float."),
        ("logit_bias", {"a": 1}, "logit_bias: the key 'a' is wrong: it must be a token id in digits."),
        ("logit_bias", {"5": 1, "05": 2}, "logit_bias: the key '05' is wrong: it must be a token id in digits."),
        ("logit_bias", {"٥": 1}, "logit_bias: the key '٥' is wrong: it must be a token id in digits."),
        ("prompt", ["x", ""], "prompt[1] is empty: give a text, or token ids."),
        ("prompt", [], "prompt is empty: give a text, or token ids."),
        ("stop", "x" * 90_000, None),
    ],
)
def test_a_wrong_value_is_shown(http: Any, field: str, value: Any, message: str | None) -> None:
    body = {"model": "fake", "prompt": "x", "max_tokens": 1, field: value}
    if message is None:
        body["temperature"] = []
        message = "temperature: Expected float, got array."
    assert check_error(http.post("/v1/completions", json=body), 400)["message"] == message


@pytest.mark.parametrize(("text", "half", "place"), [
    (r"\ud800", r"\ud800", 27), (r"ab\uDC00", r"\uDC00", 29), (r"\ud83d\ude00\uDBFFx", r"\uDBFF", 39),
    (r"\ud800\u0041", r"\ud800", 27), (r"\\ud800 \\\udc00", r"\udc00", 37),
])  # fmt: skip
def test_half_a_surrogate_pair_is_shown(http: Any, text: str, half: str, place: int) -> None:
    """The library calls most of these bodies truncated."""
    body = f'{{"model":"fake","prompt":["{text}"]}}'.encode()
    answer = http.post("/v1/completions", content=body, headers=JSON_HEADERS)
    assert check_error(answer, 400)["message"] == (
        f"The body is not valid JSON: {half} (byte {place}) is half of a surrogate pair."
    )
    whole = http.post("/v1/completions", content=rb'{"model":"fake","prompt":"\ud83d\ude00', headers=JSON_HEADERS)
    assert check_error(whole, 400)["message"].endswith("truncated.")
    path = http.post("/v1/completions", content=rb'{"model":"C:\\udata\\udcfe",}', headers=JSON_HEADERS)
    assert "trailing comma" in check_error(path, 400)["message"]


@pytest.mark.parametrize(("path", "kind"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_wrong_type_of_each_field_names_it(http: Any, path: str, kind: Any) -> None:
    annotations: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        annotations |= {name: str(text) for name, text in inspect.get_annotations(each).items()}
    for name in kind.__struct_fields__:
        if name == "prompt":
            continue
        kinds = kinds_of(annotations[name])
        refused = [value for value in (1, 1.5, "x", True, [], {}) if _kind(value) not in kinds]
        refused = [value for value in refused if not (_kind(value) == "int" and "float" in kinds)]
        assert refused, name
        for value in refused:
            answer = http.post(path, json={**valid(path), name: value})
            assert answer.status_code in (400, 404), (name, value, answer.text)
            if answer.status_code == 400:
                check_error(answer, 400, name)


def _kind(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("path", POSTS)
def test_unknown_fields_are_named(http: Any, path: str) -> None:
    good = 404 if path in ("/v1/batches", "/v1/unload_lora_adapter") else 200  # there is no such file, no such adapter
    for name in ("extra_body", "num_frobs", "request_id", "__class__", "k" * 1_000_000):
        answer = http.post(path, json={**valid(path), name: 1})
        assert answer.status_code == good, answer.text
        assert answer.headers["x-ignored-params"].startswith(name[:60])
        answer = http.post(path, json={**valid(path), name: 1}, headers={"X-Strict": "1"})
        error = check_error(answer, 400, name[:64])
        assert error.get("code", "unknown_parameter") == "unknown_parameter"


UNSUPPORTED = [
    (TEXT, "suffix", "x"), (TEXT, "best_of", 129), (CHAT, "audio", {"voice": "a", "format": "mp3"}),
    (CHAT, "functions", [{"name": "f"}]), (CHAT, "function_call", {"name": "f"}),
    (CHAT, "reasoning_effort", "low"), (CHAT, "reasoning_effort", -1),
    (CHAT, "store", True),
    (CHAT, "modalities", ["text", "audio"]), (CHAT, "verbosity", "high"), (CHAT, "chat_template", "{{ 1 }}"),
    (CHAT, "documents", [{"text": "x"}]), (CHAT, "structured_outputs", {}),
    (TEXT, "prompt_embeds", "gASVAAAA"), (TEXT, "truncate_prompt_tokens", 5),
    (TEXT, "num_beams", 4), (CHAT, "length_penalty", 2.0), (TEXT, "logits_processors", ["os.system"]),
    (TEXT, "priority", -1), (CHAT, "priority", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "name", "value"), UNSUPPORTED, ids=[f"{row[1]}-{i}" for i, row in enumerate(UNSUPPORTED)]
)
def test_what_is_not_honoured_is_refused_by_name(http: Any, path: str, name: str, value: Any) -> None:
    check_error(http.post(path, json={**valid(path), name: value}), 400, name)


BIG = 2**63
SAMPLING: list[tuple[str, list[Any]]] = [
    ("temperature", [-1, -0.001, 101, 1e38]),
    ("top_p", [0, -0.1, 1.01, 5]),
    ("top_k", [-2, 2**31, BIG]),
    ("min_p", [-0.1, 1.1]),
    ("presence_penalty", [-2.1, 2.1, 1e10]),
    ("frequency_penalty", [-2.1, 2.1, 1e10]),
    ("repetition_penalty", [0, 5e-324, 1e-40, -1, 1e10]),
    ("n", [0, -1, 129, 10**9, BIG]),
    ("min_tokens", [-1, 3, BIG]),
    ("seed", [BIG, -BIG - 1, 2**64]),
    ("stop", ["", [""], ["x"] * 65, "x" * 1025, ["x", "y" * 1_000_000], ["x"] * 100_000]),
    ("stop_token_ids", [[-1], [LOGITS_WIDTH], [BIG], [0] * 5000]),
    ("allowed_token_ids", [[], [-1], [LOGITS_WIDTH], [0] * 5000]),
    ("bad_words", [[""], ["x" * 1025], ["x"] * 257, ["y" * 1000]]),
    ("logit_bias", [{"abc": 1}, {"-1": 1}, {str(LOGITS_WIDTH): 1}, {"1": 1e30}, {"1": -101}]),
    ("logit_bias", [{str(i): 1 for i in range(10_000)}]),
    ("prompt_logprobs", [-1, 21, LOGITS_WIDTH]),
    ("max_tokens", [-1, BIG]),
    ("priority", [2**31, -(2**31) - 1, BIG]),
    ("cache_salt", ["x" * 257, "y" * 1_000_000]),
    ("user", ["x" * 1_000_000, "a\nb"]),
    ("safety_identifier", ["x" * 1_000_000]),
    ("model", ["", "x" * 1_000_000]),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("name", "values"), SAMPLING, ids=[row[0] for row in SAMPLING])
def test_values_out_of_range(http: Any, server: Any, path: str, name: str, values: list[Any]) -> None:
    before = len(server.engine.submitted)
    for value in values:
        check_error(http.post(path, json={**valid(path), name: value}), 400, name)
        check_error(http.post(path, json={**valid(path), name: value, "stream": True}), 400, name)
    assert len(server.engine.submitted) == before, "a refused request must not reach the engine"


@pytest.mark.parametrize("model", ["../../etc/passwd", "other", "fake\0", "FAKE"])
def test_unknown_models(http: Any, model: str) -> None:
    for path in set(POSTS) - {"/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}:
        error = check_error(http.post(path, json={**valid(path), "model": model}), 404, "model")
        assert error.get("code", "model_not_found") == "model_not_found"


def test_edges_that_are_allowed(http: Any, server: Any) -> None:
    for fields in (
        {"temperature": 0}, {"temperature": 1e-45}, {"temperature": 100}, {"top_k": 0}, {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-9}, {"n": 128}, {"seed": 0}, {"seed": BIG - 1}, {"stop": []}, {"logit_bias": {}},
        {"stop": ["x"] * 64},
        {"logit_bias": {str(LOGITS_WIDTH - 1): 100}}, {"stream_options": {"include_usage": True}, "stream": True},
    ):  # fmt: skip
        for path in (CHAT, TEXT):
            assert http.post(path, json={**valid(path), **fields}).status_code == 200, fields


def test_combinations(http: Any) -> None:
    for path, fields, param in (
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (TEXT, {"n": 2, "best_of": 1}, "best_of"),
        (TEXT, {"best_of": 0}, "best_of"),
        (TEXT, {"best_of": 2, "stream": True}, "best_of"),
        (TEXT, {"prompt": ["x"] * 64, "best_of": 128}, "prompt"),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False}, "messages[0]"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (TEXT, {"prompt": ["x"] * 64, "n": 128}, "prompt"),
    ):
        check_error(http.post(path, json={**valid(path), **fields}), 400, param)


def tool(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_tools(http: Any) -> None:
    deep: Any = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    for tools, param in (
        ({}, "tools"),
        ([1], "tools"),
        ([tool("")], "tools[0]"),
        ([tool("a b")], "tools[0]"),
        ([tool("x" * 65)], "tools[0]"),
        ([tool("a"), tool("a")], "tools[1]"),
        ([tool(f"f{i}") for i in range(129)], "tools"),
        ([tool("a", parameters={"type": "string"})], "tools[0]"),
        ([tool("a", parameters=deep)], "tools[0]"),
        ([tool("a", parameters=5)], "tools[0].function.parameters"),
        ([tool("a", parameters={"a": "x" * 2**20})], "tools"),
        ([tool("a"), tool("b", strict=True)], "tools"),  # nobody knows how this model writes calls
        ([{"type": "custom", "function": {"name": "a"}}], "tools[0]"),
    ):
        check_error(http.post(CHAT, json={**valid(CHAT), "tools": tools}), 400, param)
    for choice in ("required", "sometimes", {"type": "function", "function": {"name": "b"}}, tool("a"), {}):
        check_error(
            http.post(CHAT, json={**valid(CHAT), "tools": [tool("a")], "tool_choice": choice}), 400, "tool_choice"
        )
    for more in ({"strict": False}, {"strict": None}, {"parameters": None}):
        for parallel in (True, None):
            fields = {"tools": [tool("a", **more)], "parallel_tool_calls": parallel, "priority": 0}
            assert http.post(CHAT, json={**valid(CHAT), **fields}).status_code == 200
    for choice in ("auto", "none"):
        assert http.post(CHAT, json={**valid(CHAT), "tools": [tool("a")], "tool_choice": choice}).status_code == 200


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USER = {"role": "user", "content": "x"}


def test_conversations(http: Any) -> None:
    for messages, param in (
        ([], "messages"),
        ("x", "messages"),
        ([1], "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0]"),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0]"),
        ([{"role": "user", "content": ""}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0]"),
        ([{"role": "user", "content": []}], "messages[0]"),
        ([USER, {"role": "assistant"}], "messages[1]"),
        ([USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "messages[2]"),
        ([USER, {"role": "tool", "content": "1"}], "messages[1]"),
        ([USER, {"role": "tool", "content": "1", "tool_call_id": "c1"}], "messages[1]"),
        ([USER, ASKS, {"role": "tool", "content": "1", "tool_call_id": "c2"}], "messages[2]"),
        ([USER, ASKS, *[{"role": "tool", "content": "1", "tool_call_id": "c1"}] * 2], "messages[3]"),
        ([USER, ASKS, USER], "messages[2]"),
        ([USER, {**ASKS, "tool_calls": [CALL, CALL]}], "messages[1]"),
        ([{**USER, "name": "x" * 65}], "messages[0]"),
        ([{**USER, "audio": 1}], "messages[0]"),
        ([{**USER, "images": ["iVBOR"]}], "messages[0]"),
        ([USER] * 10_000, "messages"),
        ([USER] * 100_000, "messages"),
        ([{"role": "user", "content": "x" * 300_000}], "messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
            "messages[0]",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "file", "file": {"file_data": "data:;base64,AA"}}]}], "messages[0]"),
        ([{"role": "user", "content": "template, fail"}], "messages"),
    ):
        check_error(http.post(CHAT, json={**valid(CHAT), "messages": messages}), 400, param)
    for messages in (
        [USER, ASKS, {"role": "tool", "content": "1", "tool_call_id": "c1"}],
        [{"role": "developer", "content": "x"}, USER],
        [USER, {"role": "assistant", "content": "a", "refusal": None, "annotations": []}, USER],
    ):
        assert http.post(CHAT, json={**valid(CHAT), "messages": messages}).status_code == 200


def test_prompts(http: Any) -> None:
    empty: list[Any] = ["", [], [[]], [""], ["x", ""]]
    wrong: list[Any] = [[1, "x"], [[1], 2], ["x", [1]], [-1], [LOGITS_WIDTH], [BIG], [[1, BIG]]]
    long: list[Any] = [["x"] * 1_000_000, "x" * 10_000_000, [[1]] * 5000]
    for prompt in empty + wrong + long:
        check_error(http.post(TEXT, json={**valid(TEXT), "prompt": prompt}), 400, "prompt")
        check_error(http.post(TEXT, json={**valid(TEXT), "prompt": prompt, "echo": True, "logprobs": 1}), 400)
    assert http.post(TEXT, json={**valid(TEXT), "prompt": [LOGITS_WIDTH - 1], "echo": True}).status_code == 200


def test_context_is_exact(http: Any) -> None:
    for length, status in ((MAX_MODEL_LEN - 1, 200), (MAX_MODEL_LEN, 400), (MAX_MODEL_LEN + 1, 400)):
        answer = http.post(TEXT, json={**valid(TEXT), "prompt": [1] * length, "max_tokens": 1})
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    body = {**valid(TEXT), "prompt": [1] * 4000, "max_tokens": 97}
    answer = http.post(TEXT, json=body, headers={"x-strict": "1"})
    assert check_error(answer, 400)["code"] == "context_length_exceeded"
    answer = http.post(TEXT, json=body)
    assert answer.json()["usage"]["completion_tokens"] == 96
    assert (answer.headers["x-max-tokens-requested"], answer.headers["x-max-tokens"]) == ("97", "96")
    answer = http.post(TEXT, json={**body, "min_tokens": 97})
    assert check_error(answer, 400)["code"] == "context_length_exceeded"


def test_prompt_logprob_cells_are_bounded(make_server: Any) -> None:
    server = make_server(engine_options={"max_logprobs": 1000})
    with server.client() as client:
        answer = client.post(TEXT, json={**valid(TEXT), "prompt": [1] * 4000, "prompt_logprobs": 900})
    check_error(answer, 400, "prompt_logprobs")


def test_queue_full_is_429_at_once(make_server: Any) -> None:
    server = make_server()
    server.engine.held = True
    with server.client() as client:
        answer = client.post(TEXT, json={**valid(TEXT), "prompt": ["x"] * 65})
        assert check_error(answer, 429)["type"] == "rate_limit_error"
        assert answer.json()["error"]["code"] == "overloaded" and 0 < int(answer.headers["retry-after"]) <= 120
    assert not server.engine.running, "the prompts that were taken before must be given back"


def test_loading_stalled_and_dead(make_server: Any) -> None:
    loading = make_server(loaded=False)
    with loading.client() as client:
        for path in ("/health", "/metrics", "/v1/models", "/v1/engine"):
            answer = client.get(path)
            assert check_error(answer, 503)["code"] == "loading" and answer.headers["retry-after"]
        for path in POSTS:
            check_error(client.post(path, json=valid(path)), 503)
        assert client.get("/").status_code == 200 and client.get("/version").status_code == 200
    server = make_server()
    with server.client() as client:
        server.engine.stalled = True
        assert check_error(client.get("/health"), 503)["code"] == "engine_stalled"
        server.engine.stalled = False
        server.call(server.engine.die)
        check_error(client.get("/health"), 503)
        answer = client.post(CHAT, json=valid(CHAT))
        assert check_error(answer, 503)["code"] == "engine_dead" and "retry-after" in answer.headers
    assert server.state.engine_lost.is_set()


def test_faults_that_are_not_worth_a_retry_say_so(http: Any, server: Any) -> None:
    server.engine.fault = lambda request: True
    answer = http.post(TEXT, json={**valid(TEXT), "max_tokens": 9})
    assert check_error(answer, 500)["type"] == "server_error"
    assert answer.headers["x-should-retry"] == "false"


def test_refusals_of_the_engines_process_keep_their_meaning(make_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The operator has the reason of a fault, which is kept from clients."""
    server = make_server()
    server.engine.fault = lambda request: True
    with server.client() as client:
        for failure, status, code in (
            (Failure(Code.OVERLOADED, "90 sequences wait"), 429, "overloaded"),
            (Failure(Code.CONTEXT_LENGTH_EXCEEDED, "too long"), 400, "context_length_exceeded"),
            (Failure(Code.NON_FINITE_LOGITS, "at 0x7f00"), 500, "sequence_fault"),
        ):
            server.engine.failure_of_faults = failure
            for stream in (True, False):
                answer = client.post(TEXT, json={**valid(TEXT), "max_tokens": 9, "stream": stream})
                if stream:
                    assert answer.text.rstrip().endswith("}") and f'"code":"{code}"' in answer.text
                else:
                    assert check_error(answer, status)["code"] == code
                assert "0x7f00" not in answer.text
    found = [one for one in caplog.messages if one.endswith("failed in the engine: at 0x7f00 (non_finite_logits)")]
    assert len(found) == 2


def test_surprises_become_a_fixed_text(make_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret at 0x7f00 in /srv/secret")

    server.llm.submit = fail
    with server.client() as client:
        answer = client.post(TEXT, json=valid(TEXT))
    assert check_error(answer, 500)["message"] == "The server failed while it handled this request."
    assert "secret" not in answer.text and "secret" in caplog.text
