"""Tokens of reasoning are counted alike however the output is cut, and as the reader of the text sees the marks."""

from __future__ import annotations

import itertools

import pytest
from small_tokenizers import byte_fallback, byte_level
from tokenizers import AddedToken

from quire.text.reasoning import ReasoningReader
from quire.text.reasoning_count import ReasoningCount
from quire.text.tokenizer import HfTokenizer

TEXTS = [
    ("<think>hello world</think>the answer", False, "hello world"),
    (" \n<think>\nhello</think>\n\nyes <think>no</think>", False, "\nhello"),
    ("hello <think> world</think>yes</think>", True, "hello <think> world"),
    ("<think>hello, no end </thin", False, "hello, no end </thin"),
    ("<think></think>yes", False, ""),
    ("no marks, def f(x)</think>", False, ""),
    ("<thin", False, ""),
    ("</think>at once", True, ""),
    ("", True, ""),
    ("x" + " " * 70, True, "x" + " " * 70),
    (" " * 65 + "<think>late</think>", False, ""),
]


def spelled() -> HfTokenizer:
    """The marks are several tokens."""
    return HfTokenizer(byte_level(), {"type": "ByteLevel"}, {"eos_token": "</s>"})


def added(special: bool) -> HfTokenizer:
    """The marks are tokens of their own."""
    backend = byte_level()
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "</think>")])
    return HfTokenizer(backend, {"type": "ByteLevel"}, {"eos_token": "</s>"})


KINDS = {"spelled": spelled, "added": lambda: added(False), "special": lambda: added(True)}


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> HfTokenizer:
    return KINDS[request.param]()


@pytest.mark.parametrize(("text", "inside", "reasoning"), TEXTS, ids=[repr(row[0][:20]) for row in TEXTS])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_every_token_that_holds_reasoning_counts_once(
    tokenizer: HfTokenizer, text: str, inside: bool, reasoning: str, size: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    begin = text.find(reasoning, 0 if inside else text.find("<think>") + 7) if reasoning else 0
    stops = list(itertools.accumulate(len(tokenizer.token_bytes(one)) for one in ids))
    starts = [0, *stops][: len(ids)]
    end = begin + len(reasoning)
    expected = sum(start < end and stop > begin for start, stop in zip(starts, stops, strict=True))
    count = ReasoningCount(inside, tokenizer)
    for at in range(0, len(ids), size):
        count.feed(ids[at : at + size])
    assert count.n_tokens == expected
    reader = ReasoningReader(inside)
    thought = reader.feed(text)[0] + reader.finish()[0]
    assert (count.n_tokens > 0) == bool(thought.strip())


def test_control_tokens_are_no_reasoning(tokenizer: HfTokenizer) -> None:
    """Neither one at the beginning, which the text does not show, nor the one that ended it."""
    hello = tokenizer.encode("hello", add_special_tokens=False)
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<s>", "</s>"))
    mark = tokenizer.encode("<think>", add_special_tokens=False)
    count = ReasoningCount(False, tokenizer)
    count.feed([*start, *mark, *hello, *end])
    assert count.n_tokens == len(hello)


def test_other_tokenizers_count_too() -> None:
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    decoder = {"type": "Sequence", "decoders": [*steps, {"type": "Fuse"}]}
    tokenizer = HfTokenizer(byte_fallback(strip=False), decoder, {"eos_token": "</s>"})
    ids = tokenizer.encode("<think>hello</think>her", add_special_tokens=False)
    whole, cut = ReasoningCount(False, tokenizer), ReasoningCount(False, tokenizer)
    whole.feed(ids)
    for one in ids:
        cut.feed([one])
    assert whole.n_tokens == cut.n_tokens == 4, "he, l, l, o"
