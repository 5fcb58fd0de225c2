"""Which known name is meant by one that was mistyped, and how it is told."""

from __future__ import annotations

import pytest

from quire.core.spelling import did_you_mean_and_known, nearest

FLAGS = ("--request-rate", "--trace", "--max-num-seqs", "--block-size", "--tensor-parallel-size", "--seed")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--rate", "--request-rate"),  # two letters from --trace
        ("--trce", "--trace"),
        ("--num-seqs", "--max-num-seqs"),
        ("--num_seqs", "--max-num-seqs"),
        ("--size", ""),  # the end of two
        ("--eed", "--seed"),
        ("--uest-rate", ""),  # the end of no word
    ],
)
def test_the_end_of_one_longer_flag_is_near(word: str, meant: str) -> None:
    assert nearest(word, FLAGS) == meant


def test_one_letter_off_is_nearer_than_an_end() -> None:
    assert nearest("rate", ["rates", "request_rate"]) == "rates"
    assert nearest("rate", ["grade", "request_rate"]) == "request_rate"


def test_what_is_meant_and_what_there_is_are_two_sentences() -> None:
    assert did_you_mean_and_known("h20", ["h200", "a100"]) == "; did you mean h200? There are h200, a100"
    assert did_you_mean_and_known("zzzz", ["h200", "a100"], ["a100"]) == ": there are a100"
