"""A prompt that is too long is refused in the same words by the server, which counts a text, and by `LLM`."""

from __future__ import annotations

import asyncio
import pathlib
import types
from typing import Any

import pytest

import quire
from quire.core.errors import ContextLengthExceeded
from quire.core.sampling import SamplingParams
from quire.engine.input_processor import InputProcessor
from quire.serve.http.threads import LargeWorkLock
from quire.serve.openai.prompts import PromptMaker
from quire.text.tokenizer import HfTokenizer

FOLDER = pathlib.Path(quire.__file__).parent / "_models" / "demo"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs the bundled model's tokenizer")
TOO_LONG = "the prompt has 12 tokens, but at most 7 can be taken: shorten it"
REASON = ". This model's context holds 8 tokens, at least one of them for output"


def test_the_server_and_the_engine_use_the_same_words() -> None:
    tokenizer = HfTokenizer.load(FOLDER)
    text = tokenizer.decode(tokenizer.encode("one two three " * 9, add_special_tokens=False)[:12])
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 12
    loaded: Any = types.SimpleNamespace(tokenizer=tokenizer, max_model_len=8)
    maker = PromptMaker(loaded, LargeWorkLock())
    processor: Any = types.SimpleNamespace(ready=loaded)
    try:
        with pytest.raises(ContextLengthExceeded) as served:
            asyncio.run(maker.encode([text], add_special_tokens=False, param="input"))
        with pytest.raises(ContextLengthExceeded) as counted:
            asyncio.run(maker.encode([text], add_special_tokens=False, param="input", most=7))
    finally:
        maker.close()
    with pytest.raises(ContextLengthExceeded) as offline:
        InputProcessor.max_tokens(processor, 12, SamplingParams())
    assert served.value.message == offline.value.message == TOO_LONG + REASON
    assert (served.value.param, offline.value.param) == ("input", "prompt")
    assert counted.value.message == TOO_LONG, "the limit of /tokenize is not the context"
