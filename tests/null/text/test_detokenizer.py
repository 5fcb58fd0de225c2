"""Incremental text equals the text of the whole sequence, whatever the tokens and their grouping."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import byte_fallback, byte_level, word_piece

from quire.text.detokenizer import MAX_PENDING, Detokenizer
from quire.text.tokenizer import HfTokenizer


@functools.cache
def loaded(kind: str) -> HfTokenizer:
    backend = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece}[kind]()
    decoder: dict[str, Any] = {
        "byte_level": {"type": "ByteLevel"},
        "byte_fallback": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "word_piece": {"type": "WordPiece"},
    }[kind]
    return HfTokenizer(backend, decoder, {})


def stream(tokenizer: HfTokenizer, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """Texts of the calls, feeding groups of the given sizes (repeated), then the flush."""
    detokenizer, texts, at = Detokenizer(tokenizer, skip), [], 0
    while at < len(ids):
        size = sizes[len(texts) % len(sizes)]
        texts.append(detokenizer.feed(ids[at : at + size]))
        at += size
    return [*texts, detokenizer.flush()]


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@example([171, 256], [1], False)  # two bytes that begin no character together
@given(st.lists(st.integers(0, 430), max_size=40), sizes, st.booleans())
def test_random_byte_level_tokens(ids: list[int], groups: list[int], skip: bool) -> None:
    tokenizer = loaded("byte_level")
    texts = stream(tokenizer, ids, groups, skip)
    assert "".join(texts) == tokenizer.decode(ids, skip)
    assert len(texts[-1]) <= 3, "more than three bytes were held back"


@given(st.text(max_size=30), sizes)
def test_characters_are_never_split(text: str, groups: list[int]) -> None:
    tokenizer = loaded("byte_level")
    pieces = [text.encode()[i : i + 1] for i in range(len(text.encode()))]
    ids = [tokenizer.encode(piece.decode("latin-1"), False)[0] for piece in pieces if piece < b"\x80"]
    assert "".join(stream(tokenizer, ids, groups)) == "".join(char for char in text if char < "\x80")
    texts = stream(tokenizer, tokenizer.encode(text, False), groups)
    assert "".join(texts) == text
    assert all("�" not in part for part in texts) or "�" in text


@given(st.text(max_size=30), sizes)
def test_byte_fallback_keeps_the_leading_space(text: str, groups: list[int]) -> None:
    tokenizer = loaded("byte_fallback")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids, groups)) == (" " + text.replace("▁", " ") if text else "")


def test_invalid_bytes_do_not_hold_text_back_for_ever() -> None:
    tokenizer = loaded("byte_fallback")
    first = tokenizer.token_id("<0xE2>")
    letter = tokenizer.token_id("h")
    assert first is not None and letter is not None
    detokenizer = Detokenizer(tokenizer)
    emitted = "".join(detokenizer.feed([first]) for _ in range(100))
    assert len(emitted) == 99
    assert detokenizer.feed([letter]) == "�h"


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 99]), max_size=30), sizes)
def test_neighbour_dependent_decoder(ids: list[int], groups: list[int]) -> None:
    tokenizer = loaded("word_piece")
    assert "".join(stream(tokenizer, ids, groups)) == tokenizer.decode(ids)


def test_the_window_is_bounded() -> None:
    class Stub:
        longest = 0

        def pieces(self, skip: bool) -> None:
            return None

        def decode(self, ids: list[int], skip: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return "�" * len(ids)

    stub = Stub()
    detokenizer = Detokenizer(stub)  # type: ignore[arg-type]
    texts = [detokenizer.feed([1]) for _ in range(1000)]
    assert sum(map(len, texts)) + len(detokenizer.flush()) == 1000
    assert stub.longest <= 2 * MAX_PENDING


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "word_piece"])
def test_nothing_in_nothing_out(kind: str) -> None:
    assert stream(loaded(kind), [], [1]) == [""]
