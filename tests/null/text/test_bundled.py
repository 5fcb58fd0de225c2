"""The bundled model's tokenizer and template, as transformers reads them."""

from __future__ import annotations

import importlib.resources
import pathlib
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quire.text.chat_template import ChatTemplate
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import HfTokenizer

FOLDER = pathlib.Path(str(importlib.resources.files("quire"))) / "_models" / "demo"
TEXTS = ["def f(x):\n    return x + 17\n", "What is 12 * 34?", "日本語 😀", "<|nothing|>", "\t\n  \r\n", ""]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 + 4?"},
]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(FOLDER)


def test_tokens_equal_transformers(theirs: PreTrainedTokenizerFast) -> None:
    ours = HfTokenizer.load(FOLDER)
    assert len(ours) == len(theirs)
    assert ours.eos_id == theirs.eos_token_id
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        detokenizer = Detokenizer(ours)
        assert "".join(detokenizer.feed([token]) for token in ids) + detokenizer.flush() == text
    every = list(range(len(ours)))
    assert ours.decode(every, False) == theirs.decode(every, skip_special_tokens=False)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_conversations_equal_transformers(tools: Any, length: int, theirs: PreTrainedTokenizerFast) -> None:
    template = ChatTemplate.load(FOLDER)
    assert template is not None
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
    text = template.render(CHAT[:length], **options)
    assert text == theirs.apply_chat_template(CHAT[:length], tokenize=False, **options)
    ids = HfTokenizer.load(FOLDER).encode(text, add_special_tokens=False)
    assert ids == theirs.apply_chat_template(CHAT[:length], return_dict=False, **options)
