"""The answer of /v1/requests/{id}/explain, and who gets it. The figures themselves: test_serve_live.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

BODY = {"model": "fake", "prompt": [65, 66, 67], "max_tokens": 9}


def test_phases_and_reasons(server: Any) -> None:
    done = httpx.post(server.base + "/v1/completions", json=BODY).json()
    told = httpx.get(f"{server.base}/v1/requests/{done['id']}/explain").json()
    assert told["object"] == "request.explanation"
    [part] = told["parts"]
    assert part["phases"] == [
        {"name": "queue", "from_s": 0.0, "to_s": 0.25}, {"name": "prompt", "from_s": 0.25, "to_s": 0.5},
        {"name": "output", "from_s": 0.5, "to_s": 2.0},
    ]  # fmt: skip
    assert part["reasons"][0].startswith("9 tokens of output took 1.500 s")
    assert any("behind 7 sequences" in reason for reason in part["reasons"])
    assert "The best cached prefix differs at token 1: 'b' here, 'c' there." in part["reasons"]
    assert "tenant" not in part and "label" not in part


def test_a_part_for_each_prompt(server: Any) -> None:
    done = httpx.post(server.base + "/v1/completions", json={**BODY, "prompt": [[1], [2], [3]]})
    name = done.headers["x-request-id"]
    assert len(httpx.get(f"{server.base}/v1/requests/{name}/explain").json()["parts"]) == 3


def test_only_the_key_that_has_sent_it_is_told(make_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(json.dumps({"keys": [{"key": "one", "name": "a"}, {"key": "two", "name": "b"}]}))
    server = make_server(api_key_file=str(path))
    headers = {key: {"authorization": f"Bearer {key}"} for key in ("one", "two")}
    done = httpx.post(server.base + "/v1/completions", json=BODY, headers=headers["one"]).json()
    url = f"{server.base}/v1/requests/{done['id']}/explain"
    assert [httpx.get(url, headers=headers[key]).status_code for key in ("one", "two")] == [200, 404]
