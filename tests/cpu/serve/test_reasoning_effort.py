"""How much a model is asked to reason: `reasoning_effort` and its like, by what the chat template knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import httpx
import pytest
from serve_fakes import TEMPLATE

MESSAGES = [{"role": "user", "content": "x"}]
TEMPLATES = {
    "plain": TEMPLATE,
    "always": TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}",
    "switch": TEMPLATE + "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}{# <think></think> #}",
    "efforts": TEMPLATE + "[{{ reasoning_effort | default('medium') }}]",
    "both": TEMPLATE + "{% if thinking is defined %}[{{ thinking }}]{% endif %}[{{ reasoning_effort }}]",
}
GOOD = {
    "plain": {"none": ""}, "always": {"medium": "<think>"}, "switch": {"none": "[False]", "medium": "[True]"},
    "efforts": {"low": "[low]", "medium": "[medium]", "high": "[high]"},
    "both": {"none": "[False][]", "low": "[True][low]", "medium": "[True][medium]", "high": "[True][high]"},
}  # fmt: skip
"""What each takes, and what its prompt then ends with."""


@pytest.fixture(scope="module")
def servers() -> Any:
    """A server for each template."""
    from live_server import LiveServer

    from quire.serve.config import ServerConfig

    config = ServerConfig(port=0, enable_chat_template_kwargs=True)
    made = {name: LiveServer(config, template=source).start() for name, source in TEMPLATES.items()}
    yield made
    for server in made.values():
        server.stop()


def prompt_of(server: Any) -> str:
    tokenizer = server.llm.tokenizer
    text: str = tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    return text.rpartition("<|assistant|>")[2]


def chat(server: Any, effort: str) -> httpx.Response:
    body = {"model": "fake", "messages": MESSAGES, "reasoning_effort": effort, "max_tokens": 2}
    return httpx.post(server.base + "/v1/chat/completions", json=body)


def responses(server: Any, effort: str) -> httpx.Response:
    body = {"model": "fake", "input": "x", "reasoning": {"effort": effort}, "max_output_tokens": 2}
    return httpx.post(server.base + "/v1/responses", json=body)


def messages(server: Any, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 2, **fields}
    return httpx.post(server.base + "/v1/messages", json=body)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("ask", [chat, responses])
def test_efforts_that_the_template_knows(servers: Any, name: str, ask: Callable[..., httpx.Response]) -> None:
    server, param = servers[name], "reasoning_effort" if ask is chat else "reasoning.effort"
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "", "x" * 1000):
        answer = ask(server, effort)
        if name == "plain" and effort == "medium":
            assert answer.status_code == 200 and answer.headers["x-ignored-params"] == param
        elif effort in GOOD[name]:
            assert answer.status_code == 200 and prompt_of(server) == GOOD[name][effort], effort
            assert "x-ignored-params" not in answer.headers
            if ask is responses:
                assert answer.json()["reasoning"]["effort"] == effort
        else:
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param and error["code"] == "unsupported_parameter"
            assert error["message"].startswith(f"{param} is not supported: {effort[:40]!r}"[:-1])
            assert len(error["message"]) < 400
            assert all(good in error["message"] for good in GOOD[name]), "it says what would be taken"


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("plain", {"disabled": "", "adaptive": ""}), ("always", {"enabled": "<think>", "adaptive": "<think>"}),
        ("switch", {"disabled": "[False]", "enabled": "[True]", "adaptive": ""}),
        ("efforts", {"enabled": "[medium]", "adaptive": "[medium]"}),
        ("both", {"disabled": "[False][]", "enabled": "[True][medium]", "adaptive": "[]"}),
    ],
)  # fmt: skip
def test_thinking_of_messages(servers: Any, name: str, taken: dict[str, str]) -> None:
    server = servers[name]
    for kind in ("disabled", "enabled", "adaptive"):
        answer = messages(server, thinking={"type": kind})
        if kind in taken:
            assert answer.status_code == 200 and prompt_of(server) == taken[kind], kind
        else:
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and message.startswith(f"thinking is not supported: the type '{kind}'")
            assert "effort '" not in message and "medium" not in message, "words that the client did not send"
            assert message.endswith(f"it takes {', '.join(sorted(taken, key=('disabled enabled adaptive').index))}.")


def test_thinking_and_effort_together(servers: Any) -> None:
    server = servers["both"]
    for thinking, effort, end in (
        ("enabled", "high", "[True][high]"), ("adaptive", "low", "[True][low]"), ("disabled", "none", "[False][]"),
    ):  # fmt: skip
        answer = messages(server, thinking={"type": thinking}, output_config={"effort": effort})
        assert answer.status_code == 200 and prompt_of(server) == end
    for thinking, effort in (("disabled", "low"), ("enabled", "none")):
        answer = messages(server, thinking={"type": thinking}, output_config={"effort": effort})
        assert answer.status_code == 400 and f"thinking is {thinking}" in answer.json()["error"]["message"]
    answer = messages(server, output_config={"effort": "max"})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("output_config.effort is not")
    counted = [
        httpx.post(
            server.base + "/v1/messages/count_tokens",
            json={"model": "fake", "messages": MESSAGES, "thinking": {"type": kind}},
        ).json()["input_tokens"]
        for kind in ("adaptive", "disabled")
    ]
    assert counted[1] - counted[0] == len("[False]"), "the tokens are those of the prompt that would run"


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_default_effort_asks_for_nothing(servers: Any, name: str) -> None:
    """Anthropic's is high. Alone, or where thinking is off; a strict request is told that nothing comes of it."""
    server = servers[name]
    alone = {"output_config": {"effort": "high"}}
    assert messages(server, **alone).status_code == 200
    off = {**alone, "thinking": {"type": "disabled"}}
    answer = messages(server, **off)
    if "none" not in GOOD[name]:
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("thinking is not supported")
        return
    assert answer.status_code == 200 and answer.headers["x-ignored-params"] == "output_config.effort"
    assert prompt_of(server) == GOOD[name]["none"]
    strict = httpx.post(
        server.base + "/v1/messages",
        json={"model": "fake", "messages": MESSAGES, "max_tokens": 2, **off},
        headers={"x-strict": "1"},
    )
    assert strict.status_code == 400 and "output_config.effort" in strict.json()["error"]["message"]


def test_refusals_speak_of_what_was_sent(servers: Any) -> None:
    budget = {"thinking": {"type": "enabled", "budget_tokens": 20}}
    asked = httpx.post(
        servers["plain"].base + "/v1/chat/completions", json={"model": "fake", "messages": MESSAGES, **budget}
    )
    error = asked.json()["error"]
    assert (asked.status_code, error["param"]) == (400, "thinking")
    assert error["message"] == (
        "thinking is not supported: the type 'enabled' cannot be asked of this model, whose chat template cannot "
        "switch reasoning on; it takes disabled, adaptive."
    )
    for name, think, words in (
        ("plain", True, "think is not supported: true cannot be asked of this model"),
        ("plain", True, "it takes false."),
        ("always", False, "think is not supported: false cannot be asked of this model"),
        ("switch", "low", "think is not supported: 'low' cannot be asked of this model, whose chat template can only"),
    ):
        body = {"model": "fake", "messages": MESSAGES, "think": think}
        for path in ("chat", "generate"):
            sent = body if path == "chat" else {**body, "prompt": "x"}
            answer = httpx.post(f"{servers[name].base}/api/{path}", json=sent)
            assert answer.status_code == 400 and words in answer.json()["error"]
            assert "effort" not in answer.json()["error"] and "medium" not in answer.json()["error"].partition(";")[0]
    body = {"model": "fake", "messages": MESSAGES, "enable_thinking": False}
    message = httpx.post(servers["switch"].base + "/v1/chat/completions", json=body).json()["error"]["message"]
    assert "enable_thinking" in message and "chat_template_kwargs" in message


def test_a_switch_set_twice_must_agree(servers: Any) -> None:
    body = {"model": "fake", "messages": MESSAGES, "reasoning_effort": "none", "max_tokens": 2}
    for value, status in ((False, 200), (True, 400)):
        kwargs = {"chat_template_kwargs": {"enable_thinking": value}}
        answer = httpx.post(servers["switch"].base + "/v1/chat/completions", json=body | kwargs)
        assert answer.status_code == status


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
def test_an_answer_without_reasoning_is_content(parser: Literal["deepseek_r1", "qwen3"]) -> None:
    """Where the template leaves no trace of being switched off at the end of the prompt."""
    from live_server import LiveServer

    from quire.serve.config import ServerConfig

    config = ServerConfig(port=0, reasoning_parser=parser, enable_chat_template_kwargs=True)
    server = LiveServer(config, template=TEMPLATES["switch"]).start()
    try:
        for text, fields, thought, content in (
            ("It is 4.", {"reasoning_effort": "none"}, None, "It is 4."),
            ("It is 4.", {"chat_template_kwargs": {"enable_thinking": False}}, None, "It is 4."),
            ("<think>Hm</think>It is 4.", {"reasoning_effort": "none"}, "Hm", "It is 4."),
            ("Hm</think>It is 4.", {"reasoning_effort": "medium"}, "Hm", "It is 4."),
            ("Hm</think>It is 4.", {}, "Hm", "It is 4."),
        ):
            if parser == "qwen3" and not text.startswith("<") and thought is not None:
                continue  # the mark at the beginning is needed there
            server.engine.text = text
            body = {"model": "fake", "messages": MESSAGES, **fields}
            message = httpx.post(server.base + "/v1/chat/completions", json=body).json()["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (thought, content), fields
    finally:
        server.stop()


@pytest.mark.parametrize("thinking", [{}, {"type": "x"}, {"type": "enabled", "budget_tokens": -1}, 5, {"budget": 1}])
def test_bad_thinking(servers: Any, thinking: Any) -> None:
    answer = messages(servers["both"], thinking=thinking)
    assert answer.status_code == 400 and "thinking" in answer.json()["error"]["message"]
