"""Wrong paths and methods: the answer names what was meant."""

from __future__ import annotations

from typing import Any

import pytest
from test_http_hostile import check_error

from quire.serve.app import PATHS
from quire.serve.http.misses import no_such_path

CASES = {
    "/chat/completions": "/v1/chat/completions? The base_url of an OpenAI client ends in /v1",
    "/v1/v1/messages": "/v1/messages? There is one /v1 too many",
    "/v1/chat/completion": "did you mean /v1/chat/completions?",
    "/v1/chat/completions/": "did you mean /v1/chat/completions?",
    "//v1//models": "did you mean /v1/models?",
    "/openai/v1/chat/completions": "did you mean /v1/chat/completions? (--root-path",
    "/helath": "did you mean /health?",
    "/nothing/like/it": "/openapi.json lists what there is",
    "/" + "x" * 5000: "…'.",
}


@pytest.mark.parametrize("path", CASES)
def test_what_was_meant(path: str) -> None:
    refusal = no_such_path(path, PATHS)
    assert refusal.status == 404 and CASES[path] in refusal.message and len(refusal.message) < 250


def test_over_http(server: Any) -> None:
    with server.client() as http:
        message = check_error(http.post("/chat/completions", json={}), 404)["message"]
        assert "did you mean /v1/chat/completions?" in message and "'/chat/completions'" in message
        answer = http.get("/v1/chat/completions")
        message = check_error(answer, 405)["message"]
        assert message == "'/v1/chat/completions' does not take the method GET: it takes POST."
        message = check_error(http.put("/v1/files", json={}), 405)["message"]
        assert message.endswith("it takes GET or HEAD or POST.")
