"""Matchers by handle: what each request may spend on its masks."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import quire
from quire.core.structured import StructuredOutputsParams
from quire.text import matchers
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.matchers import MANY, TOO_SLOW, Matchers
from quire.text.tokenizer import HfTokenizer

FOLDER = pathlib.Path(quire.__file__).parent / "_models" / "demo"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs the bundled model's tokenizer")
WIDTH = 4096


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(HfTokenizer.load(FOLDER), WIDTH, [2, 0])


def make(compiler: GrammarCompiler, n: int, n_threads: int = 1) -> tuple[Matchers, list[int]]:
    watched: list[int] = []
    marks = [0]
    made = Matchers(n_threads, marks, lambda together: watched.append(marks[0]))
    for handle in range(1, n + 1):
        made.begin([handle], compiler.compile(grammar_of(StructuredOutputsParams(regex="a+"))), [[]])
    watched.clear()
    return made, watched


def first_token(bits: np.ndarray) -> int:
    return int(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0])


def test_slow_masks_end_their_request(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    made, watched = make(compiler, 2)
    monkeypatch.setattr(matchers, "MASK_S", -10.0)
    bits = np.zeros((1, WIDTH // 32), "<i4")
    assert made.fill([1], bits) == [] and watched == [1]
    token = first_token(bits[0])
    assert [(end.handle, end.failure) for end in made.advance([(1, [token]), (2, [token])])] == [(1, TOO_SLOW)]


def test_sequences_of_a_request_share_its_time(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = make(compiler, 0)
    made.begin([1, 2], compiler.compile(grammar_of(StructuredOutputsParams(regex="a+"))), [[], []])
    monkeypatch.setattr(matchers, "MASK_S", -10.0)
    bits = np.zeros((1, WIDTH // 32), "<i4")
    made.fill([1], bits)
    token = first_token(bits[0])
    assert [end.failure for end in made.advance([(2, [token])])] == [TOO_SLOW]


def test_slow_masks_of_many_are_told_apart(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks made together are not timed one by one; once they take too long they are, and charged."""
    made, watched = make(compiler, 20, n_threads=2)
    rows = list(range(1, 21))
    together, apart = np.zeros((20, WIDTH // 32), "<i4"), np.zeros((20, WIDTH // 32), "<i4")
    made.fill(rows, together)
    assert set(watched) == {MANY}
    monkeypatch.setattr(matchers, "MASK_S", -0.1)
    made.fill(rows, together)  # they take too long: from now on each is made alone
    assert set(watched) == {MANY}
    watched.clear()
    made.fill(rows, apart)
    assert watched == rows and (apart == together).all()
    token = first_token(apart[3])
    for _ in range(3):
        made.fill(rows, apart)
    assert [end.failure for end in made.advance([(4, [token])])] == [TOO_SLOW]


def test_unknown_rows_may_be_anything(compiler: GrammarCompiler) -> None:
    made, _ = make(compiler, 1)
    bits = np.zeros((3, WIDTH // 32), "<i4")
    made.fill([0, 1, 7], bits)
    assert (bits[[0, 2]] == -1).all() and not (bits[1] == -1).all()
