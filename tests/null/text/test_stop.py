"""Stop strings: the same cut for every chunking, nothing held back without need, linear work."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text import stop as stop_module
from quire.text.stop import StopMatcher, StopStrings

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
    started_s = time.process_time()
    for _ in range(4000):
        matcher.feed("a")
    assert time.process_time() - started_s < 10, "a quadratic matcher takes minutes"
    assert matcher.flush() == "a" * 1023


def read(matcher: StopMatcher, text: str) -> tuple[str, str | None]:
    """One character at a time."""
    emitted = ""
    for char in text:
        new, found = matcher.feed(char)
        emitted += new
        if found is not None:
            return emitted, found
    return emitted + matcher.flush(), None


@pytest.mark.parametrize("most", [1, 2, 4096])
@given(texts=st.lists(letters, min_size=2, max_size=4), stops=stop_lists)
def test_sequences_share_what_was_found_of_the_stop_strings(most: int, texts: list[str], stops: list[str]) -> None:
    """Also where states are forgotten on the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop_module, "MAX_STATES", most)
        strings = StopStrings(stops)
        matchers = [StopMatcher(strings) for _ in texts]
        emitted, found = [""] * len(texts), [None] * len(texts)
        for at in range(max(map(len, texts))):
            for index, (matcher, text) in enumerate(zip(matchers, texts, strict=True)):
                if at < len(text) and found[index] is None:
                    new, found[index] = matcher.feed(text[at])  # type: ignore[call-overload]
                    emitted[index] += new
        for index, matcher in enumerate(matchers):
            assert (emitted[index] + matcher.flush(), found[index]) == cut(texts[index], stops, False)


def test_states_are_bounded_and_a_state_is_made_once() -> None:
    strings = StopStrings(["a" * (1023 - i) + "b" for i in range(64)])
    for _ in range(3):
        assert read(StopMatcher(strings), "a" * 3000) == ("a" * 3000, None)
    assert len(strings._states) == 1024
    many = StopStrings(["".join(chr(0x4E00 + (7 * i + j) % 500) for j in range(900)) for i in range(16)])
    for i in range(16):
        read(StopMatcher(many), "".join(chr(0x4E00 + (7 * i + j) % 500) for j in range(899)))
    assert len(many._states) <= stop_module.MAX_STATES
