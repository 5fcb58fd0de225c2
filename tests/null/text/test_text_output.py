"""The text of a sequence: stop strings across tokens, minimum lengths, the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level

from quire.core.sampling import SamplingParams
from quire.text.output import TextStream
from quire.text.tokenizer import HfTokenizer

TOKENIZER = HfTokenizer(byte_level(), {"type": "ByteLevel"}, {})


def run(ids: list[int], params: SamplingParams, sizes: list[int]) -> tuple[str, str | None]:
    """Whole text and stop string, fed in groups; asserts that nothing follows a stop."""
    stream, text, stop, at, step = TextStream(TOKENIZER, params), "", None, 0, 0
    while True:
        size = sizes[step % len(sizes)]
        step += 1
        new, found = stream.feed(ids[at : at + size], at + size >= len(ids))
        assert stop is None or (new, found) == ("", None)
        text, stop, at = text + new, stop or found, at + size
        if at >= len(ids):
            return text, stop


groups = st.lists(st.integers(1, 4), min_size=1, max_size=4)


stop_lists = st.lists(st.text("lo w\n日", min_size=1, max_size=3), max_size=3)


@given(st.text("hello wrd\n日😀", max_size=30), stop_lists, groups)
def test_grouping_of_tokens_does_not_matter(text: str, stops: list[str], sizes: list[int]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    params = SamplingParams(stop=stops)
    assert run(ids, params, sizes) == run(ids, params, [len(ids) + 1])
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    whole, found = run(ids, params, [1])
    assert (found is None) == (not ends)
    if found is None:
        assert whole == text
    else:
        assert text.startswith(whole + found) and len(whole + found) == min(ends)


@pytest.mark.parametrize("n_min", range(8))
def test_stop_strings_count_only_after_the_minimum(n_min: int) -> None:
    ids = TOKENIZER.encode("\n") * 6
    text, stop = run(ids, SamplingParams(stop=["\n"], min_tokens=n_min, max_tokens=99), [1])
    assert (text, stop) == (("\n" * n_min, "\n") if n_min < 6 else ("\n" * 6, None))
    assert run(ids, SamplingParams(stop=["\n"], min_tokens=n_min, max_tokens=99), [4]) == (text, stop)


def test_the_stop_string_can_be_kept() -> None:
    ids = TOKENIZER.encode("hello world, the quick")
    assert run(ids, SamplingParams(stop=["world"]), [2]) == ("hello ", "world")
    params = SamplingParams(stop=["world"], include_stop_str_in_output=True)
    assert run(ids, params, [2]) == ("hello world", "world")


def test_the_end_brings_what_was_held_back() -> None:
    for stops in ([], ["STOP"]):
        stream = TextStream(TOKENIZER, SamplingParams(stop=stops))
        assert stream.feed(TOKENIZER.encode("ST"), False) == ("" if stops else "ST", None)
        assert stream.feed([], True) == ("ST" if stops else "", None)
        assert stream.feed(TOKENIZER.encode("more"), False) == ("", None)
    half = [token for token in range(len(TOKENIZER)) if TOKENIZER.token_bytes(token) == b"\xe6"]
    stream = TextStream(TOKENIZER, SamplingParams())
    assert stream.feed(half, False) == ("", None)
    assert stream.feed([], True) == ("�", None)
