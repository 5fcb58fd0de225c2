"""A model without a chat template: the server says which flag gives it one, and which route needs none."""

from __future__ import annotations

import asyncio
import types

import pytest

from quire.config.engine import EngineConfig
from quire.config.options import keyword_options
from quire.core.errors import ConfigError
from quire.engine.llm import LLM
from quire.serve.http.refusal import Refusal
from quire.serve.http.threads import LargeWorkLock
from quire.serve.openai.conversation import Conversation
from quire.serve.openai.prompts import PromptMaker


def test_the_reply_says_what_to_pass() -> None:
    maker = PromptMaker(types.SimpleNamespace(chat_template=None, tokenizer="any"), LargeWorkLock())  # type: ignore[arg-type]
    with pytest.raises(Refusal) as caught:
        asyncio.run(maker.render(Conversation([{"role": "user", "content": "x"}], None, True, False, {}, 1)))
    maker.close()
    said = str(vars(caught.value))
    assert "--chat-template FILE" in said and "/v1/completions" in said and "no_chat_template" in said


def test_without_a_tokenizer_no_template_would_help() -> None:
    """Nor is one taken at the start."""
    maker = PromptMaker(types.SimpleNamespace(chat_template=None, tokenizer=None), LargeWorkLock())  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="without a tokenizer: send token ids to /v1/completions") as caught:
        asyncio.run(maker.render(Conversation([{"role": "user", "content": "x"}], None, True, False, {}, 1)))
    maker.close()
    assert "--chat-template" not in str(vars(caught.value))
    llm = object.__new__(LLM)  # without an engine
    llm._frontend = types.SimpleNamespace(chat_template=None, tokenizer=None)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="without a tokenizer: give token ids"):
        llm.render_chat([], chat_template="{{ messages }}")
    for more in ({"model": "shape:qwen3-0.6b"}, {"skip_tokenizer_init": True}):
        with pytest.raises(ConfigError, match="chat_template needs a tokenizer"):
            keyword_options(EngineConfig, {"chat_template": "chat.jinja", **more}, "LLM")


def test_a_script_is_told_too() -> None:
    llm = object.__new__(LLM)  # without an engine
    llm._frontend = types.SimpleNamespace(chat_template=None, tokenizer="any")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="chat_template=FILE"):
        llm.render_chat([])
