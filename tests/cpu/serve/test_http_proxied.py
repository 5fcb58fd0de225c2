"""--root-path and --default-chat-template-kwargs: a server behind a path, and variables that requests need not send."""

from __future__ import annotations

from typing import Any

import pytest
from test_http_hostile import check_error

from quire.core.errors import ConfigError
from quire.serve.config import ServerConfig

HI = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def test_paths_with_and_without_the_prefix(make_server: Any) -> None:
    server = make_server(root_path="/llm/a", api_key="abc")
    with server.client() as client:
        for path in ("/v1/models", "/llm/a/v1/models"):
            assert client.get(path).json()["object"] == "list"
        assert client.get("/llm/a/openapi.json").json()["servers"] == [{"url": "/llm/a"}]
        assert client.get("/llm/a/").headers["content-type"].startswith("text/html")
        wrong = ("/llm/v1/models", "/llm/a//v1/models", "/llm/av1/models", "/llm/a/llm/a/v1/models")
        for path in (*wrong, "/llm/%61/v1/models"):
            check_error(client.get(path), 404)
        error = client.post("/llm/a/v1/messages", json={}).json()
        assert error["type"] == "error", "the dialect is that of the path behind the prefix"
        assert client.get("/llm/a/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    with make_server().client() as plain:
        assert "servers" not in plain.get("/openapi.json").json()
        check_error(plain.get("/llm/a/v1/models"), 404)


def shown_prompt(server: Any) -> str:
    return server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=True)


def test_the_requests_own_variables_win(make_server: Any) -> None:
    server = make_server(default_chat_template_kwargs={"mood": "calm"}, enable_chat_template_kwargs=True)
    with server.client() as client:
        chat = "/v1/chat/completions"
        for own, prompt in (({}, "user:Hi\n[calm]"), ({"mood": "sour"}, "user:Hi\n[sour]")):
            assert client.post(chat, json={**HI, "chat_template_kwargs": own}).status_code == 200
            assert shown_prompt(server) == prompt
            asked = {"messages": HI["messages"], "chat_template_kwargs": own}
            found = client.post("/tokenize", json=asked).json()["tokens"]
            assert found == server.engine.submitted[-1].prompt_token_ids
        assert client.post("/v1/messages", json=HI).status_code == 200 and shown_prompt(server).endswith("[calm]")
        ollama = {"model": "fake", "messages": HI["messages"], "stream": False, "options": {"num_predict": 1}}
        assert client.post("/api/chat", json=ollama).status_code == 200 and shown_prompt(server).endswith("[calm]")


@pytest.mark.parametrize("root", ["llm", "/llm/", "/", "/a b", "/..", "/a/../b", "/a?b", "/%61", "//a"])
def test_a_prefix_that_is_none(root: str) -> None:
    with pytest.raises(ConfigError, match="root_path"):
        ServerConfig(root_path=root).verify()


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "Enable", "a-b", "", "x" * 65])
def test_variables_that_cannot_be_set(name: str) -> None:
    with pytest.raises(ConfigError, match="default_chat_template_kwargs"):
        ServerConfig(default_chat_template_kwargs={name: 1}).verify()
