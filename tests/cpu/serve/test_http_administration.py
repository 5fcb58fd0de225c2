"""/ping, /load, /reset_prefix_cache, /sleep, /wake_up and /is_sleeping: what they do, and who may ask for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_http_hostile import check_error, http  # noqa: F401

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": "x", "max_tokens": 2}


@pytest.fixture
def sleeper(make_server: Any) -> Any:
    return make_server(engine_options={"enable_sleep_mode": True})


def test_ping_is_health_by_another_name(make_server: Any) -> None:
    server = make_server(api_key="abc")
    with httpx.Client(base_url=server.base) as client:
        for method in ("GET", "POST"):
            assert client.request(method, "/ping").json() == {"status": "ok"}
            assert client.request(method, "/ping", headers={"host": "10.0.0.7"}).status_code == 200
        server.engine.stalled = True
        assert check_error(client.get("/ping"), 503)["code"] == "engine_stalled"


def test_load_counts_requests(server: Any) -> None:
    with server.client() as client:
        assert client.get("/load").json() == {"server_load": 0}
        server.engine.held = True
        threads = [threading.Thread(target=lambda: client.post(TEXT, json=BODY)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while len(server.engine.running) < 2:
            pass
        assert client.get("/load").json() == {"server_load": 2}
        server.engine.held = False
        for thread in threads:
            thread.join()


def test_the_prefix_cache_is_reset(http: httpx.Client) -> None:  # noqa: F811
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert http.post("/reset_prefix_cache?reset_running_requests=false").status_code == 200
    check_error(http.post("/reset_prefix_cache?reset_running_requests=true"), 400, "reset_running_requests")
    check_error(http.get("/reset_prefix_cache"), 405)


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_requests_are_told_to_come_later(sleeper: Any, level: int) -> None:
    with sleeper.client() as client:
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        assert client.post(f"/sleep?level={level}").json() == {"is_sleeping": True}
        assert sleeper.engine.asleep == level and client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.get("/health").status_code == 200
        before = len(sleeper.engine.submitted)
        chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        bodies = {TEXT: BODY, "/v1/embeddings": {"model": "fake", "input": "x"}}
        bodies["/v1/messages"] = {**chat, "max_tokens": 2}
        for path, body in bodies.items():
            answer = client.post(path, json=body)
            check_error(answer, 503)
            assert int(answer.headers["retry-after"]) > 0 and "wake" in answer.text
        assert len(sleeper.engine.submitted) == before
        assert client.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
        assert client.post(TEXT, json=BODY).status_code == 200


def test_what_runs_is_ended(sleeper: Any) -> None:
    sleeper.engine.held = True
    with sleeper.client() as client:
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.append(client.post(TEXT, json=BODY)))
        thread.start()
        while not sleeper.engine.running:
            pass
        assert client.post("/sleep").status_code == 200
        thread.join()
        assert check_error(found[0], 503)["code"] == "engine_asleep"
        client.post("/wake_up")


def test_a_failure_says_why(sleeper: Any) -> None:
    sleeper.engine.sleep_failure = "the engine cannot wake up: no memory"
    with sleeper.client() as client:
        for path in ("/sleep", "/wake_up"):
            error = check_error(client.post(path), 500)
            assert error["code"] == "sleep_failed" and "no memory" in error["message"]


def test_the_engines_end_ends_the_wait(sleeper: Any) -> None:
    sleeper.engine._obey = lambda order: sleeper.engine.die()
    with sleeper.client() as client:
        check_error(client.post("/sleep"), 503)


def test_without_the_option_it_is_off(http: httpx.Client) -> None:  # noqa: F811
    for path in ("/sleep", "/wake_up"):
        error = check_error(http.post(path), 400)
        assert error["code"] == "sleep_disabled" and "--enable-sleep-mode" in error["message"]
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


REFUSED = [
    ("/sleep?level=0", "level"), ("/sleep?level=3", "level"), ("/sleep?level=x", "level"), ("/sleep?level=", "level"),
    ("/sleep?level=1&level=2", "level"), ("/sleep?mode=wait", "mode"),
    ("/wake_up?tags=weights", "tags"),
    ("/sleep?" + "&".join("abcdefghijklmnopqrs"), None),
    ("/sleep?level=" + "9" * 5000, "level"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_bad_queries(sleeper: Any, path: str, param: str | None) -> None:
    with sleeper.client() as client:
        check_error(client.post(path), 400, param)
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(("field", "name"), [("depth=1", "depth"), ("k" * 5000, "k" * 64 + "~")])
def test_unknown_fields_of_a_query_are_named(sleeper: Any, field: str, name: str) -> None:
    with sleeper.client() as client:
        check_error(client.post(f"/sleep?{field}", headers={"x-strict": "1"}), 400)
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        answer = client.post(f"/sleep?{field}")
        assert answer.json() == {"is_sleeping": True} and answer.headers["x-ignored-params"] == name


def test_tenants_may_not(make_server: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "tenant-key-1", "name": "default"}]}))
    server = make_server(api_key="operator", api_key_file=str(keys), engine_options={"enable_sleep_mode": True})
    with server.client() as client:
        for path in ("/reset_prefix_cache", "/sleep", "/wake_up"):
            tenant = {"authorization": "Bearer tenant-key-1"}
            assert check_error(client.post(path, headers=tenant), 403)["code"] == "operator_only"
            assert client.post(path).status_code == 200
            foreign = {"origin": "https://evil.example"}
            assert check_error(client.post(path, headers=foreign), 403)["code"] == "origin_not_allowed"
