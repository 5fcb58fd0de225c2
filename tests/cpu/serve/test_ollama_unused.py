"""Ollama's fields that do nothing here are named, and refused in strict mode; /api/show tells the template in use."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serve_fakes import MAX_MODEL_LEN, TEMPLATE
from test_http_hostile import check_error, http  # noqa: F401

HI: Any = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, Any] = {
    "chat": {"messages": HI, "stream": False},
    "generate": {"prompt": "x", "stream": False},
    "embed": {"input": "x"},
    "embeddings": {"prompt": "x"},
}
MACHINE: dict[str, Any] = {
    "num_ctx": MAX_MODEL_LEN * 4, "num_keep": 4, "num_batch": 512, "num_gpu": 0, "main_gpu": 0, "num_thread": 8,
    "draft_num_predict": 4, "numa": False, "low_vram": True, "f16_kv": True, "use_mmap": False, "use_mlock": True,
    "penalize_newline": True,
}  # fmt: skip
OFF: dict[str, Any] = {
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "tfs_z": 1, "vocab_only": False,
    "repeat_last_n": 64,
}  # fmt: skip


def post(http: httpx.Client, path: str, strict: bool = False, **fields: Any) -> httpx.Response:  # noqa: F811
    body = {"model": "fake", **BODIES[path], **fields}
    return http.post(f"/api/{path}", json=body, headers={"x-strict": "1"} if strict else {})


def named(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return set(filter(None, answer.headers.get("x-ignored-params", "").split(", ")))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [MACHINE, OFF])
def test_options_without_effect_are_named(http: httpx.Client, path: str, options: dict[str, Any]) -> None:  # noqa: F811
    assert named(post(http, path, options=options)) == {f"options.{name}" for name in options}
    assert named(post(http, path, options=dict.fromkeys(options), keep_alive=None)) == set()
    for name, value in options.items():
        error = check_error(post(http, path, strict=True, options={name: value}), 400)
        assert f"options.{name}" in error["message"] and "strict" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_how_long_a_model_stays_is_not_the_clients_to_say(http: httpx.Client, path: str) -> None:  # noqa: F811
    for value in ("5m", 0, -1):
        assert named(post(http, path, keep_alive=value)) == {"keep_alive"}
    assert "keep_alive" in check_error(post(http, path, strict=True, keep_alive="5m"), 400)["message"]
    unload = http.post("/api/generate", json={"model": "fake", "keep_alive": 0})
    assert named(unload) == {"keep_alive"} and unload.json()["done_reason"] == "load"


def test_sampling_does_nothing_to_vectors(http: httpx.Client) -> None:  # noqa: F811
    assert named(post(http, "embed", options={"temperature": 0.5, "mirostat": 2})) == {
        "options.temperature",
        "options.mirostat",
    }
    assert named(post(http, "embed", truncate=True)) == set(), "it cuts"


def test_empty_overrides_ask_for_nothing(http: httpx.Client) -> None:  # noqa: F811
    assert named(post(http, "generate", suffix="", template="", context=[], truncate=True)) == {
        "suffix", "template", "context", "truncate",
    }  # fmt: skip
    assert named(post(http, "chat", truncate=False, shift=True)) == {"truncate", "shift"}


def test_what_is_honoured_is_not_named(http: httpx.Client) -> None:  # noqa: F811
    options = {"temperature": 0, "num_predict": 3, "repeat_last_n": -1, "repeat_penalty": 1.1, "seed": 1, "stop": ["q"]}
    assert named(post(http, "chat", strict=True, options=options, format="", think=False)) == set()


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE + '{# """ #}', None])
def test_show_has_the_template_in_use(make_server: Any, template: str | None) -> None:
    server = make_server(engine_options={} if template is None else {"template": template})
    if template is None:
        server.llm.chat_template = None
    with server.client() as client:
        answer = client.post("/api/show", json={"model": "fake", "verbose": True})
        found = answer.json()
        assert named(answer) == {"verbose"} and found["modelfile"].startswith("FROM fake:latest\n")
        assert found.get("template") == template
        assert ("Jinja" in found["modelfile"]) == (template is not None)
        assert (f'TEMPLATE """{TEMPLATE}"""\n' in found["modelfile"]) == (template == TEMPLATE)
        assert "{{ .Prompt }}" not in json.dumps(found)
