"""A text that copies itself, seen without a drafter."""

from __future__ import annotations

import random

import pytest

from quire.control.repeats import ENDING, MOST_KNOWN, NEAR, STREAK, Repeats


def longest(text: list[int]) -> int:
    """How many tokens at the end stood before, by looking everywhere."""
    n = 0
    while any(text[end - n - 1 : end] == text[len(text) - n - 1 :] for end in range(n + 1, len(text))):
        n += 1
    return n


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("n_ids", [2, 5, 40])
def test_streaks_are_those_of_a_search(n_ids: int, every: int) -> None:
    """Of a text that is read token by token, or a few at a time."""
    source = random.Random(n_ids)
    for _ in range(20):
        text = [source.randrange(n_ids) + 100_000 for _ in range(60)]
        text += text[10:40]
        repeats, streak = Repeats(0), 0
        for end in range(1, len(text) + 1, every):
            foretold, before = longest(text[:end]) - ENDING, streak
            before = before if before <= foretold else 0
            streak = 0 if foretold < STREAK else max(before, STREAK << ((foretold // STREAK).bit_length() - 1))
            assert repeats.read(text[:end]) == (streak > before)
            assert repeats.streak == streak


@pytest.mark.parametrize("n_ids", [2, 5, 40])
def test_whoever_waits_as_long_as_is_said_misses_no_copy(n_ids: int) -> None:
    """While nothing copies, nor while a copy goes on."""
    source, n_reads, n_tokens = random.Random(n_ids), 0, 0
    for _ in range(20):
        text = [source.randrange(n_ids) for _ in range(60)]
        text += text[10:50] + [source.randrange(n_ids) for _ in range(30)]
        each, patient, next_read = Repeats(0), Repeats(0), 1
        for end in range(1, len(text) + 1):
            says = each.read(text[:end])
            if end < next_read:
                assert not says or patient.streak > 0
                continue
            n_reads += 1
            assert patient.read(text[:end]) == says or patient.streak > 0
            next_read = end + patient.n_ahead
            if patient.streak != each.streak:  # another copy began meanwhile
                break
        n_tokens += end
    assert n_ids < 40 or n_reads < 0.4 * n_tokens


def test_a_text_that_repeats_itself_for_ever_is_seldom_read() -> None:
    text = [100_000 + place % 7 for place in range(2000)]
    repeats, said, end, n_reads = Repeats(0), list[int](), 1, 0
    while end <= len(text):
        n_reads += 1
        if repeats.read(text[:end]):
            said.append(repeats.streak)
        end += repeats.n_ahead
    assert said == [4, 8, 16, 32, 64, 128, 256] and n_reads < 2000 / 10


def test_another_copy_is_noticed_though_the_one_before_was_longer() -> None:
    """One that began and one that ended between two looks, as while drafts are verified nobody looks."""
    repeats, text = Repeats(0), list(range(200))
    text += text[:100]
    assert repeats.read(text) and repeats.streak == 64
    text += [1000, *text[140:147]]
    assert repeats.read(text) and repeats.streak == STREAK
    text += text[147:149]
    assert not repeats.read(text), "it is not twice as long"


def test_a_text_that_is_not_longer_says_nothing() -> None:
    repeats, text = Repeats(0), [1, 2, 3, 4, 5, 6, 7] * 2
    assert repeats.read(text) and not repeats.read(text)


def test_of_a_long_text_its_newest_tokens_are_known() -> None:
    text = list(range(7, 7 + MOST_KNOWN))
    repeats = Repeats(0)
    repeats.read(text)
    text += text[-50:-40]
    assert repeats.read(text)
    text += range(10 * MOST_KNOWN, 11 * MOST_KNOWN)
    assert not repeats.read(text)
    text += text[:20]
    assert not repeats.read(text), "they are too long ago"
    text += text[-60:-50]
    assert repeats.read(text)


@pytest.mark.parametrize(("n_ids", "is_found"), [(2, False), (4, False), (1000, True)])
def test_a_text_of_few_distinct_tokens_is_searched_near_its_end(n_ids: int, is_found: bool) -> None:
    """There a search stops at nearly each token, tens of microseconds in all that is known, at every look."""
    source = random.Random(3)
    text = [source.randrange(n_ids) for _ in range(2 * NEAR)]
    for distance, expected in ((NEAR + 200, is_found), (NEAR - 200, True)):
        repeats = Repeats(0)
        repeats.read(text)
        copied = text[-distance:][:100]
        repeats.read(text + copied)
        assert (repeats.streak >= 64) == expected
