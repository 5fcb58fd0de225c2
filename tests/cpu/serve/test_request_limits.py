"""Limits on what one request may cost (docs/operating.md) that no other file tries to pass: the refusal says which
limit it was, and a request that is known brings the same bytes after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from light_server import BODY, PATH, light, wait_for
from serve_fakes import MAX_MODEL_LEN, reply_to

KIB = 1024
SLOW = 204
"""First token of a prompt of whose steps the engine of `light_server.py` makes long ones."""
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
VALUES = 1 << 10


def canary(server: Any) -> None:
    answer = httpx.post(server.base + PATH, json={"model": "fake", "prompt": [5, 6], "max_tokens": 30}, timeout=60)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


@dataclasses.dataclass(frozen=True)
class Case:
    """A request beyond one limit, and what the refusal has."""

    options: dict[str, int]
    path: str
    over: dict[str, Any]
    within: dict[str, Any]
    """Changes that bring it below the limit."""
    status: int
    code: str
    words: tuple[str, ...]
    """The limit among them."""


TEXT: dict[str, Any] = {"model": "fake", "prompt": [5, 6], "max_tokens": 4}
TALK: dict[str, Any] = {"model": "fake", "messages": HI, "max_tokens": 4}
INPUT: dict[str, Any] = {"model": "fake", "input": "Hi"}
CASES = {
    "body": Case(
        {"max_body_bytes": 4096}, PATH, {**TEXT, "metadata": {"k": "v" * 4096}}, {"metadata": {"k": "v"}},
        413, "content_too_large", ("4096",),
    ),
    "prompts": Case(
        {"max_prompts": 4}, PATH, {**TEXT, "prompt": [[5]] * 5}, {"prompt": [[5]] * 4}, 400, "invalid_value",
        ("prompt", "5", "4"),
    ),
    "prompts times n": Case(
        {"max_prompts": 4}, PATH, {**TEXT, "prompt": [[5]] * 3, "n": 2}, {"n": 1}, 400, "invalid_value",
        ("3", "n = 2", "4"),
    ),
    "inputs": Case(
        {"max_prompts": 4}, "/v1/embeddings", {**INPUT, "input": [[5]] * 5}, {"input": [[5]] * 4}, 400, "invalid_value",
        ("input", "4"),
    ),
    "logprobs of a text": Case(
        {"max_logprob_cells": VALUES}, PATH, {**TEXT, "n": 16, "max_tokens": 4, "logprobs": 20}, {"n": 12}, 400,
        "invalid_parameter", ("16 x 4 x 21", str(VALUES), "Lower n"),
    ),
    "logprobs of a chat": Case(
        {"max_logprob_cells": VALUES}, CHAT, {**TALK, "n": 16, "logprobs": True, "top_logprobs": 20}, {"n": 12}, 400,
        "invalid_parameter", ("16 x 4 x 21", str(VALUES), "Lower n"),
    ),
    "tokens of a chat": Case(
        {"strict": True}, CHAT, {**TALK, "max_tokens": MAX_MODEL_LEN}, {"max_tokens": 64}, 400,
        "context_length_exceeded", (str(MAX_MODEL_LEN),),
    ),
    "token ids": Case(
        {}, PATH, {**TEXT, "prompt": [7] * (1 << 20)}, {"prompt": [7]}, 400, "context_length_exceeded",
        (str(1 << 20), str(1 << 19), str(MAX_MODEL_LEN)),
    ),
    "token ids in lists": Case(
        {}, PATH, {**TEXT, "prompt": [[7], [7] * (1 << 20)]}, {"prompt": [[7]]}, 400, "context_length_exceeded",
        (str(1 << 20), str(1 << 19), str(MAX_MODEL_LEN)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_is_beyond_a_limit_is_refused_with_the_limit(make_server: Any, case: Case) -> None:
    server = make_server(**case.options)
    canary(server)
    with server.client() as http:
        answer = http.post(case.path, json=case.over)
        assert answer.status_code == case.status, answer.text
        error = answer.json()["error"]
        assert error["code"] == case.code and all(word in error["message"] for word in case.words), error
        assert not server.engine.running
        canary(server)
        assert http.post(case.path, json={**case.over, **case.within}).status_code == 200, "the limit itself is allowed"
    canary(server)


def test_bodies_that_are_read_at_once_have_one_room(make_server: Any) -> None:
    """One body that does not come to its end holds its share; the next large one is told to come again."""
    server = make_server(max_pending_body_bytes=256 * KIB)
    large = {**TEXT, "metadata": {"k": "v" * (200 * KIB)}}
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {300 * KIB}\r\n"
    with server.connect() as held, server.client() as http:
        held.sendall(head.encode() + b"\r\n" + b" " * (250 * KIB))
        wait_for(lambda: server.state._bodies.n_bytes == (250 - 64) * KIB)
        answer = http.post(PATH, json=large)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "overloaded", answer.text
        assert answer.headers["retry-after"] and str(256 * KIB) in answer.json()["error"]["message"]
        canary(server)
    wait_for(lambda: server.state._bodies.n_bytes == 0)
    with server.client() as http:
        assert http.post(PATH, json={**large, "metadata": {}, "user": "u" * 10}).status_code == 200
    canary(server)


def test_time_in_the_engine_and_in_its_queue_has_an_end(tmp_path: Path) -> None:
    """Either request would take most of a minute: each is ended by its limit and by nothing else."""
    with light(tmp_path, "--request-timeout", "3", "--max-queue-seconds", "1", "--max-num-seqs", "1") as server:
        before = server.wait_ready().canary()
        slow = {**BODY, "prompt": [SLOW, 0], "max_tokens": 1000}
        answers: list[httpx.Response] = []
        first = threading.Thread(target=lambda: answers.append(httpx.post(server.base + PATH, json=slow, timeout=120)))
        first.start()
        wait_for(lambda: httpx.get(server.base + "/v1/engine", timeout=60).json()["stats"]["n_running"] == 1)
        second = httpx.post(server.base + PATH, json=BODY, timeout=120)
        first.join()
        assert second.status_code == 503 and second.json()["error"]["code"] == "queue_timeout", second.text
        assert answers[0].status_code == 408 and answers[0].json()["error"]["code"] == "request_timeout"
        assert server.canary() == before


def test_requests_take_no_thread_and_give_their_descriptors_back(tmp_path: Path) -> None:
    """100 at once: each holds its connection. Threads are those of the process, as many as without them."""
    n_clients = 100
    with light(tmp_path, "--max-num-seqs", "4") as server, contextlib.ExitStack() as clients:
        before = server.wait_ready().canary()
        process = psutil.Process(server.process.pid)
        n_threads, n_open = process.num_threads(), process.num_fds()
        data = json.dumps({**BODY, "prompt": [SLOW, 0], "max_tokens": 1000}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        for _ in range(n_clients):
            connection = clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

        def n_taken() -> int:
            stats = httpx.get(server.base + "/v1/engine", timeout=60).json()["stats"]
            return int(stats["n_running"] + stats["n_waiting"])

        wait_for(lambda: n_taken() == n_clients)
        assert abs(process.num_fds() - n_open - n_clients) <= 8, "a connection each"
        assert process.num_threads() - n_threads <= min(32, (os.cpu_count() or 1) + 4), "only the pool grows"
        clients.close()
        wait_for(lambda: process.num_fds() <= n_open + 2)
        assert server.canary() == before
