"""Keys and their limits, time limits, and what one sees while the server is full."""

from __future__ import annotations

import concurrent.futures
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fakes import reply_to

from quire.core.errors import ConfigError
from quire.core.failure import Code, Failure
from quire.serve.http.keys import LOOK_S, Bucket, KeyRing

PATH = "/v1/completions"
BODY = {"model": "fake", "prompt": [5, 6], "max_tokens": 4}


def write_keys(path: Path, *keys: dict[str, Any]) -> str:
    path.write_text(json.dumps({"keys": list(keys)}))
    return str(path)


def ask(server: Any, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(server.base + PATH, json={**BODY, **fields}, headers=headers, timeout=60)


def canary(server: Any, key: str = "") -> None:
    answer = ask(server, key, max_tokens=30)
    assert answer.json()["choices"][0]["text"] == reply_to([5, 6])[:30]


def test_keys_from_a_file_are_tenants_with_limits(make_server: Any, tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys",
        {"key": "one", "name": "a", "requests_per_minute": 3},
        {"key": "two", "name": "b", "tokens_per_minute": 10},
        {"key": "free"},
    )
    server = make_server(api_key_file=path, max_queue_seconds=7, request_timeout=9)
    assert [ask(server, "one").status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = ask(server, "one")
    assert refused.json()["error"] | {"message": ""} == {
        "message": "", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded",
    }  # fmt: skip
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert [ask(server, "two").status_code for _ in range(3)] == [200, 200, 429], "6 tokens a request"
    canary(server, "free")
    terms = [request.terms for request in server.engine.submitted]
    assert {t.tenant for t in terms} >= {"a", "b"} and all((t.queue_limit_s, t.time_limit_s) == (7, 9) for t in terms)
    salts = {request.terms.tenant: request.cache_salt for request in server.engine.submitted}
    assert len(set(salts.values())) == len(salts) and "" not in salts.values(), "tenants share no prefixes"
    for key in ("", "three", "one two"):
        assert ask(server, key).status_code == 401


def test_users_share_fairly_under_labels_that_say_nothing_of_them(make_server: Any) -> None:
    server = make_server()
    messages = [{"role": "user", "content": "x"}]
    bodies = [
        ("/v1/completions", {"prompt": [5], "user": "ann"}),
        ("/v1/completions", {"prompt": [5], "safety_identifier": "ann"}),
        ("/v1/chat/completions", {"messages": messages, "user": "ann"}),
        ("/v1/responses", {"input": "x", "safety_identifier": "ann"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4, "metadata": {"user_id": "ann"}}),
        ("/v1/completions", {"prompt": [5], "user": "bob"}),
        ("/v1/completions", {"prompt": [5]}),
    ]
    for path, body in bodies:
        answer = httpx.post(server.base + path, json={"model": "fake", **body}, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
    *ann, bob, nobody = [request.terms.user for request in server.engine.submitted]
    assert len(set(ann)) == 1 and len(ann[0]) == len(bob) == 4 and ann[0] != bob and nobody == ""


def test_a_revoked_key_is_refused_and_a_bad_file_changes_nothing(make_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    server = make_server(api_key_file=write_keys(path, {"key": "old"}, {"key": "kept"}))
    assert ask(server, "old").status_code == 200
    path.write_text("{not json")
    time.sleep(LOOK_S + 0.1)
    assert ask(server, "old").status_code == 200, "the keys stay as they were"
    write_keys(path, {"key": "kept"}, {"key": "new"})
    time.sleep(LOOK_S + 0.1)
    assert [ask(server, key).status_code for key in ("old", "new")] == [401, 200]
    canary(server, "kept")


def test_a_key_file_that_becomes_a_pipe_holds_up_nobody(make_server: Any, tmp_path: Path) -> None:
    """It is read on the event loop: opening a pipe that nobody writes would be the end of all requests."""
    path = tmp_path / "keys"
    server = make_server(api_key_file=write_keys(path, {"key": "kept"}))
    assert ask(server, "kept").status_code == 200
    path.unlink()
    os.mkfifo(path)
    time.sleep(LOOK_S + 0.1)
    assert [ask(server, key).status_code for key in ("kept", "other")] == [200, 401]
    server.call(server.state.keys.reload)
    canary(server, "kept")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"keys": []}', '{"keys": [{"key": ""}]}', '{"keys": [{"key": "a b"}]}',
             '{"keys": [{"key": "a", "requests_per_minute": -1}]}', '{"keys": [{"key": "a", "rpm": 1}]}',
             '{"keys": [{"key": "a", "name": "x\\n"}]}'],
)  # fmt: skip
def test_bad_key_files_are_refused_at_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="api_key_file"):
        KeyRing(None, str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(None, str(tmp_path / "absent"))


def test_buckets_follow_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    bucket = Bucket(60)
    for _ in range(60):
        assert bucket.wait_s() == 0
        bucket.spend(1)
    assert bucket.wait_s() == pytest.approx(1.0)
    now_s += 0.5
    assert bucket.wait_s() == pytest.approx(0.5)
    now_s -= 100  # a clock that goes back gives nothing and locks nobody out
    assert bucket.wait_s() == pytest.approx(0.5)
    now_s += 0.6
    assert bucket.wait_s() == 0
    bucket.spend(600)
    assert bucket.wait_s() == pytest.approx(600, rel=0.01)


@pytest.mark.parametrize(("code", "status"), [("queue_timeout", 503), ("request_timeout", 408)])
@pytest.mark.parametrize("stream", [False, True])
def test_time_limits_are_answers(server: Any, code: str, status: int, stream: bool) -> None:
    server.engine.fault, server.engine.failure_of_faults = (lambda request: True), Failure(Code(code), "too late")
    answer = ask(server, max_tokens=8, stream=stream)
    if stream:
        last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == code and "[DONE]" not in answer.text
    else:
        assert answer.status_code == status and answer.json()["error"]["code"] == code
        assert ("retry-after" in answer.headers) == (status == 503)
    server.engine.fault = lambda request: False
    canary(server)


def test_health_and_metrics_are_quick_while_the_queue_is_full(make_server: Any) -> None:
    server = make_server()
    server.engine.held = True
    with concurrent.futures.ThreadPoolExecutor(80) as pool:
        waiting = [pool.submit(ask, server) for _ in range(64)]
        deadline_s = time.monotonic() + 60
        while len(server.engine.submitted) < 64 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        with httpx.Client(base_url=server.base) as http:
            refused_s: list[float] = []
            for _ in range(10):
                began_s = time.monotonic()
                answer = http.post(PATH, json=BODY)
                refused_s.append(time.monotonic() - began_s)
                assert answer.status_code == 429 and answer.headers["retry-after"]
                assert answer.json()["error"]["code"] == "overloaded"
            assert sorted(refused_s)[5] < 0.05
            for path in ("/health", "/metrics"):
                times_s = []
                for _ in range(9):
                    began_s = time.monotonic()
                    assert http.get(path).status_code == 200
                    times_s.append(time.monotonic() - began_s)
                assert sorted(times_s)[4] < 0.1
        server.engine.held = False
        assert all(one.result().status_code == 200 for one in waiting)
    assert len(server.engine.submitted) == 64, "nothing of the refused was queued"
    canary(server)
