"""A text that copies itself, seen without a drafter."""

from __future__ import annotations

import random

import pytest

from quire.control.repeats import ENDING, MOST_READ, STREAK, Repeats


def streaks(text: list[int]) -> list[int]:
    """What `Repeats.streak` is behind each token, by looking everywhere for the latest place."""
    found, place = [0] * len(text), 0
    for at in range(ENDING, len(text)):
        if place and text[place] == text[at]:
            found[at], place = found[at - 1] + 1, place + 1
            continue
        ending = text[at + 1 - ENDING : at + 1]
        places = [i + 1 for i in range(ENDING, at) if text[i + 1 - ENDING : i + 1] == ending]
        place = places[-1] if places else 0
    return found


@pytest.mark.parametrize("n_ids", [2, 5, 40])
def test_streaks_are_those_of_a_search(n_ids: int) -> None:
    source = random.Random(n_ids)
    for _ in range(20):
        text = [source.randrange(n_ids) for _ in range(60)]
        text += text[10:40]
        repeats, said = Repeats(0), []
        for end in range(1, len(text) + 1):
            before = repeats.streak
            said.append(repeats.read(text[:end]))
            assert repeats.streak == streaks(text)[end - 1]
            assert said[-1] == (repeats.streak > before and repeats.streak in (STREAK, 8, 16, 32, 64))


def test_a_long_text_is_read_in_parts() -> None:
    text = list(range(MOST_READ)) * 3
    repeats, n_calls = Repeats(len(text)), 1
    while not repeats.read(text):
        n_calls += 1
        text.append(text[len(text) - MOST_READ])
        assert n_calls < 600
    assert n_calls > len(text) // MOST_READ - 1
