"""Stop strings: the same cut for every chunking, nothing held back without need, linear work."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.stop import StopMatcher

letters = st.text("ab\n", min_size=0, max_size=30)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)
chunk_sizes = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first end of any stop string, the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    """By definition: the longest end of the text that a stop string starts with."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


@given(letters, stop_lists, chunk_sizes, st.booleans())
def test_the_cut_does_not_depend_on_chunks(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    matcher, emitted, at, step = StopMatcher(stops, include), "", 0, 0
    while at < len(text):
        size = sizes[step % len(sizes)]
        step += 1
        new, found = matcher.feed(text[at : at + size])
        at += size
        emitted += new
        if found is not None:
            assert (emitted, found) == cut(text, stops, include)
            assert matcher.flush() == ""
            return
        seen = text[:at]
        assert emitted == seen[: len(seen) - held_back(seen, stops)]
    assert (emitted + matcher.flush(), None) == cut(text, stops, include)


@pytest.mark.parametrize(
    ("stops", "chunks", "expected"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], ("one\ntwo", "\n\n")),
        (["User:"], ["Hi Us", "er", "! User", ": x"], ("Hi User! ", "User:")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["abc", "b"], ["a", "bc"], ("a", "b")),
        (["xabc", "abc"], ["xab", "c"], ("", "xabc")),
        (["aab", "aaab"], ["aa", "aab"], ("a", "aaab")),
        (["日本"], ["こ日", "本語"], ("こ", "日本")),
    ],
)
def test_examples(stops: list[str], chunks: list[str], expected: tuple[str, str]) -> None:
    matcher, emitted, found = StopMatcher(stops), "", None
    for chunk in chunks:
        if found is None:
            text, found = matcher.feed(chunk)
            emitted += text
    assert (emitted, found) == expected


def test_many_long_stop_strings_cost_linear_time() -> None:
    matcher = StopMatcher(["a" * (1023 - i) + "b" for i in range(64)])
    started_s = time.perf_counter()
    for _ in range(4000):
        matcher.feed("a")
    assert time.perf_counter() - started_s < 10, "a quadratic matcher takes minutes"
    assert matcher.flush() == "a" * 1023
