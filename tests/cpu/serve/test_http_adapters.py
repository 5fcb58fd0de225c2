"""/v1/load_lora_adapter and /v1/unload_lora_adapter, and adapters as models of requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_bodies import CHAT, OTHER_BODIES, TEXT, check_error, valid

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def server(make_server: Any) -> Any:
    return make_server()


@pytest.fixture
def client(server: Any) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def names(client: httpx.Client) -> list[str]:
    return [one["id"] for one in client.get("/v1/models").json()["data"]]


def test_a_loaded_adapter_is_a_model(server: Any, client: httpx.Client) -> None:
    check_error(client.post(TEXT, json={**valid(TEXT), "model": "sql"}), 404, "model")
    answer = client.post(LOAD, json={"lora_name": "sql", "lora_path": "folder"})
    assert answer.status_code == 200 and "'sql' added successfully" in answer.text
    assert names(client) == ["fake", "fake-alias", "sql"]
    model = client.get("/v1/models/sql").json()
    assert (model["root"], model["parent"]) == ("folder", "fake")
    for path in (CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/embeddings", "/api/chat", "/pooling", "/v1/score"):
        body = valid(path) if path in (CHAT, TEXT) else OTHER_BODIES[path]
        for name, expected in (("sql", "sql"), ("fake", "")):
            answer = client.post(path, json={**body, "model": name})
            assert answer.status_code == 200, answer.text
            assert server.engine.submitted[-1].adapter == expected, path
    line = next(
        line for line in client.get("/metrics").text.splitlines() if line.startswith("quire:lora_requests_info")
    )
    assert 'running_lora_adapters="sql"' in line and 'max_lora="4"' in line
    assert client.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200
    assert names(client) == ["fake", "fake-alias"]
    check_error(client.post(TEXT, json={**valid(TEXT), "model": "sql"}), 404, "model")
    assert check_error(client.post(UNLOAD, json={"lora_name": "sql"}), 404)["code"] == "adapter_not_found"


BAD: list[dict[str, Any]] = [
    {}, {"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": 5, "lora_path": "x"},
    *({"lora_name": name, "lora_path": "x"} for name in ("", " x", "a\nb", "fake", "fake-alias", "x" * 300)),
    {"lora_name": "x", "lora_path": ["y"]},
]  # fmt: skip


def test_bad_bodies_and_reasons_of_the_engine(server: Any, client: httpx.Client) -> None:
    for body in BAD:
        check_error(client.post(LOAD, json=body), 400)
    server.engine.sleep_failure = "it is not inside"
    error = check_error(client.post(LOAD, json={"lora_name": "x", "lora_path": "../y"}), 400, "lora_path")
    assert (error["message"], error["code"]) == ("it is not inside", "adapter_not_loaded")
    server.engine.sleep_failure, server.engine.failed_param = "all adapters are in use", "lora_name"
    check_error(client.post(LOAD, json={"lora_name": "x", "lora_path": "y"}), 400, "lora_name")
    server.engine.sleep_failure, server.engine.failed_param = "r = 999 is too large", "r"
    check_error(client.post(LOAD, json={"lora_name": "x", "lora_path": "y"}), 400, "lora_path")
    assert names(client) == ["fake", "fake-alias"]


def test_tenants_may_not(make_server: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "tenant-key-1", "name": "default"}]}))
    with make_server(api_key="operator", api_key_file=str(keys)).client() as client:
        for path in (LOAD, UNLOAD):
            tenant = {"authorization": "Bearer tenant-key-1"}
            answer = client.post(path, json={"lora_name": "x", "lora_path": "y"}, headers=tenant)
            assert check_error(answer, 403)["code"] == "operator_only"
        assert client.post(LOAD, json={"lora_name": "x", "lora_path": "y"}).status_code == 200
