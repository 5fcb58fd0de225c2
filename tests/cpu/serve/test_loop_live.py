"""The event loop of an API process is never held for more than 50 ms, whatever is sent: one real server, every family
of endpoints with heavy inputs at once. Only the program's own doing counts, not that the machine had no free core.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from light_server import PATH, Light, light

from quire.serve.ops.loop_monitor import LIMIT_S, LOOK_S

MIB = 1 << 20
BODY_BYTES = 14 * MIB
LINE_BYTES = 3 * MIB
CHAT = "/v1/chat/completions"
LOG_LINE = "the event loop was held for"
LAG = re.compile(r'quire:event_loop_lag_max_seconds\{cause="(loop|interpreter)",process="\d+"\} (\S+)')
TEXT = {"model": "demo", "prompt": [5, 7], "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {f"field_{i}": {"type": "string", "enum": ["x" * 40]} for i in range(8000)}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TURNS = [{"role": ("user", "assistant")[i % 2], "content": f"word {i} " * 20} for i in range(4001)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Light]:
    folder = tmp_path_factory.mktemp("loop")
    with light(folder, "--data-dir", str(folder / "data"), "--max-num-seqs", "64") as started:
        yield started.wait_ready()


def post(server: Light, path: str, body: dict[str, Any] | bytes, *statuses: int) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps({"model": "demo", **body}).encode()
    headers = {"content-type": "application/json"}
    with httpx.stream("POST", server.base + path, content=data, headers=headers, timeout=300) as answer:
        answer.read()
    assert answer.status_code in (statuses or (200,)), answer.text[:500]
    return answer


def whole_answers(server: Light) -> None:
    """16 sequences of 400 tokens with 21 logprobs each, as three families write them."""
    size = {"n": 16, "max_tokens": 400, "seed": 3}
    answer = post(server, PATH, {**TEXT, **size, "logprobs": 20})
    assert len(answer.content) > MIB
    chat = {"messages": TURNS[:1], "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    assert len(post(server, CHAT, {**chat, **size}).content) > 4 * MIB
    echo = {**TEXT, "prompt": [[9] * 1500] * 4, "max_tokens": 4, "echo": True, "logprobs": 20}
    assert len(post(server, PATH, echo).content) > MIB


def streams(server: Light) -> None:
    body = {**TEXT, "n": 16, "max_tokens": 200, "logprobs": 20, "stream": True}
    assert post(server, PATH, body).text.endswith("data: [DONE]\n\n")


def large_bodies(server: Light) -> None:
    """14 MiB of one kind of value after the other; all of them ask for too much."""
    ids = b'{"model":"demo","prompt":[' + b"1234,1," * (BODY_BYTES // 7) + b"1]}"
    numbers = b'{"model":"demo","prompt":"x","logit_bias":{"1":[' + b"1," * (BODY_BYTES // 2) + b"1]}}"
    escapes = b'{"model":"demo","prompt":"' + b"\\n" * (BODY_BYTES // 2) + b'"}'
    words = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "ab c " * (BODY_BYTES // 5)}]})
    lists = b'{"model":"demo","prompt":[' + b"[]," * (BODY_BYTES // 3) + b"[]]}"
    umlauts = json.dumps({"model": "demo", "prompt": "\u00e4" * (BODY_BYTES // 2)}, ensure_ascii=False).encode()
    few = [{"role": "user", "content": [{"type": "text", "text": "x" * 100}] * 40}] * 2000
    many = json.dumps({"model": "demo", "messages": few}).encode()
    bodies = [(PATH, ids), (PATH, numbers), (PATH, escapes), (CHAT, words.encode()), (PATH, lists), (PATH, umlauts)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        work = [pool.submit(post, server, path, body, 400, 429) for path, body in [*bodies, (CHAT, many)]]
        for one in work:
            one.result()


def batches(server: Light) -> None:
    """Lines of 3 MB: good ones, one that is no JSON, one that is too long for the model."""
    good = {**TEXT, "max_tokens": 400, "n": 8, "logprobs": 20}
    bodies: list[dict[str, Any]] = [
        {**TEXT, "metadata": {}, "prompt": "word " * (LINE_BYTES // 5)}, good,
        {**TEXT, "prompt": [1] * (LINE_BYTES // 3)}, good,
        {**TEXT, "max_tokens": 2, "stop": ["y" * 1000] * 4, "prompt": [3, 4], "user": "u" * 100},
    ]  # fmt: skip
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": PATH, "body": {"model": "demo", **body}})
        + " " * (LINE_BYTES if body is good else 0)
        for i, body in enumerate(bodies)
    ]
    lines.append("[" * LINE_BYTES)
    with httpx.Client(base_url=server.base, timeout=120) as http:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", "\n".join(lines).encode())}}
        file = http.post("/v1/files", **form).raise_for_status().json()  # type: ignore[arg-type]
        wanted = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=wanted).raise_for_status().json()
        end_s = time.monotonic() + 240
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < end_s, batch
            time.sleep(0.1)
            batch = http.get(f"/v1/batches/{batch['id']}").json()
        assert batch["status"] == "completed", batch
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                http.get(f"/v1/files/{batch[name]}/content").raise_for_status()


def schemas(server: Light) -> None:
    """The engine of this server compiles none; reading, checking and sending them is the API process's work."""
    assert len(json.dumps(SCHEMA)) > MIB // 2
    ask = {"messages": TURNS[:1], "max_tokens": 4}
    post(server, CHAT, {**ask, "response_format": FORM}, 400)
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    post(server, CHAT, {**ask, "tools": tools}, 200, 400)
    text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    post(server, "/v1/responses", {"input": "x", "max_output_tokens": 4, "text": text}, 400)
    given = [{"name": "f", "input_schema": SCHEMA}]
    post(server, "/v1/messages", {"messages": TURNS[:1], "max_tokens": 4, "tools": given}, 200, 400)


def conversations(server: Light) -> None:
    for turns in (TURNS, TURNS[:21]):
        status = 200 if len(turns) < 100 else 400
        post(server, CHAT, {"messages": turns, "max_tokens": 4}, status)
        items = [{"type": "message", **turn} for turn in turns]
        post(server, "/v1/responses", {"input": items, "max_output_tokens": 16}, status)
        post(server, "/v1/messages", {"messages": turns, "max_tokens": 4}, status)
        post(server, "/v1/messages/count_tokens", {"messages": turns}, 200, 400)


def other_dialects(server: Light) -> None:
    """Long answers of /v1/responses and /v1/messages, whole and streamed."""
    for stream in (False, True):
        ask = {"stream": stream, "ignore_eos": True}
        body = {"input": "Hi", "max_output_tokens": 1500, "top_logprobs": 20}
        post(server, "/v1/responses", {**body, "stream": stream, "include": ["message.output_text.logprobs"]})
        post(server, "/v1/messages", {"messages": TURNS[:1], "max_tokens": 1500, "stream": stream})
        post(server, CHAT, {**ask, "messages": TURNS[:1], "max_tokens": 1500, "logprobs": True, "top_logprobs": 20})


def vectors(server: Light) -> None:
    post(server, "/v1/embeddings", {"input": [[i % 4000, 5, 6] for i in range(500)]}, 200, 429)
    post(server, "/v1/embeddings", {"input": ["many words " * 100] * 200}, 200, 429)
    tokens = post(server, "/tokenize", {"prompt": "many words " * 300_000}, 200, 400)
    found = tokens.json().get("tokens") or [5] * 300_000
    post(server, "/detokenize", {"tokens": found}, 200, 400)


def pipeline(server: Light) -> None:
    """2,000 requests in one piece, the last of which closes the connection."""
    data = json.dumps({**TEXT, "max_tokens": 1}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    work = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
    get = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
    requests = (work + get + b"\r\n") * 300 + (get + b"\r\n") * 1400 + get + b"connection: close\r\n\r\n"
    received = bytearray()
    address = ("127.0.0.1", server.port)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, socket.create_connection(address, timeout=240) as connection:
        sent = pool.submit(connection.sendall, requests)
        while chunk := connection.recv(1 << 20):
            received += chunk
        sent.result()
    assert received.count(b"HTTP/1.1 200 OK") == 2001


def contents(server: Light) -> None:
    """A file of 60 MB there and back."""
    data = b"x" * (60 * MIB)
    with httpx.Client(base_url=server.base, timeout=240) as http:
        files = {"file": ("a.jsonl", data)}
        file = http.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        assert http.get(f"/v1/files/{file['id']}/content").content == data
        http.get("/v1/files").raise_for_status()
        http.delete(f"/v1/files/{file['id']}").raise_for_status()


def looks(server: Light) -> None:
    with httpx.Client(base_url=server.base, timeout=120) as http:
        for _ in range(30):
            for path in ("/metrics", "/v1/engine", "/v1/load", "/v1/models", "/openapi.json", "/", "/health"):
                http.get(path).raise_for_status()
            time.sleep(0.1)


FAMILIES: list[Callable[[Light], None]] = [
    whole_answers, streams, large_bodies, batches, schemas, conversations, other_dialects, vectors, pipeline, contents,
    looks,
]  # fmt: skip


def held(server: Light) -> dict[str, float]:
    """The longest that the loop was held since the server began, by cause, in seconds."""
    return {cause: float(value) for cause, value in LAG.findall(httpx.get(server.base + "/metrics", timeout=60).text)}


def test_nothing_holds_the_loop(server: Light) -> None:
    before = server.canary()
    with concurrent.futures.ThreadPoolExecutor(len(FAMILIES)) as pool:
        running = [pool.submit(family, server) for family in FAMILIES]
        for family in running:
            family.result()
    assert server.canary() == before
    time.sleep(3 * LOOK_S)
    lines = [line for line in server.log.splitlines() if LOG_LINE in line]
    assert not lines, "\n".join(lines)
    worst = held(server)
    assert worst.keys() == {"loop", "interpreter"} and worst["loop"] <= LIMIT_S, worst
