"""Matchers by handle: what each request may spend on its masks."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Sequence

import numpy as np
import pytest

import quire
from quire.core.plan import SpanDrafts
from quire.core.structured import StructuredOutputsParams
from quire.text import matchers
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.matcher import Matcher
from quire.text.matchers import MANY, TOO_SLOW, Matchers
from quire.text.tokenizer import HfTokenizer

FOLDER = pathlib.Path(quire.__file__).parent / "_models" / "demo"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs the bundled model's tokenizer")
WIDTH = 4096


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(HfTokenizer.load(FOLDER), WIDTH, [2, 0])


def make(compiler: GrammarCompiler, n: int) -> tuple[Matchers, list[int]]:
    watched: list[int] = []
    marks = [0]
    made = Matchers(marks, lambda together: watched.append(marks[0]))
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
    made, watched = make(compiler, 20)
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


SHAPE = {"json": {"type": "object", "properties": {"a": {"enum": ["x", "xy", 3]}}, "required": ["a"]}}
TEXTS = ['{"a": "xy"}', '{"a":3}', '{"a" : "x"} more', '{"a": wrong', "wrong"]


def spelt(compiler: GrammarCompiler, text: str) -> list[int]:
    return [compiler._tokenizer.encode(one, add_special_tokens=False)[-1] for one in text]


def chains(drafts: Sequence[list[int]]) -> list[SpanDrafts]:
    return [SpanDrafts(one) for one in drafts]


@pytest.mark.parametrize("n_known", [0, 3])
def test_masks_along_drafts_are_those_of_the_tokens(compiler: GrammarCompiler, n_known: int) -> None:
    """As if the drafts had been said, up to the first that may not be; and as if they had not, afterwards."""
    made, watched = make(compiler, 0)
    grammar = grammar_of(StructuredOutputsParams(**SHAPE))
    spelled = [spelt(compiler, text) for text in TEXTS]
    handles, drafts = [5, 6, 7, 8, 9], [tokens[n_known:] for tokens in spelled]
    made.begin(handles, compiler.compile(grammar), [tokens[:n_known] for tokens in spelled])
    watched.clear()
    lost = {9} if n_known else set()  # "wrong" is no beginning
    rows, drafts = [5, 6, 1, 7, 8, 9], [*drafts[:2], [4, 4], *drafts[2:]]
    bits = np.full((len(rows) + sum(map(len, drafts)), WIDTH // 32), 7, "<i4")
    plain = np.zeros((len(rows), WIDTH // 32), "<i4")
    marks = {MANY, *handles, *(MANY - one for one in handles)}
    for _ in range(2):
        assert made.fill(rows, bits, chains(drafts)) == [] and set(watched) <= marks
        assert made.fill(rows, plain) == []
        at = 0
        for handle, tokens, first in zip(rows, drafts, plain, strict=True):
            lines = bits[at : at + 1 + len(tokens)]
            at += len(lines)
            assert (lines[0] == first).all()
            if handle == 1 or handle in lost:
                assert (lines == -1).all()
                continue
            known = spelled[handles.index(handle)][:n_known]
            for n, line in enumerate(lines):
                assert (line == alone(compiler, grammar, [*known, *tokens[:n]])).all(), (handle, n)


def random_tree(rng: random.Random, compiler: GrammarCompiler, text: str, n: int) -> SpanDrafts:
    """Nodes in any order in which parents come first; a child goes on with the text, mostly, or says something else."""
    tokens, parents, depths = list[int](), list[int](), list[int]()
    while len(tokens) < n:
        parent = rng.choice([-1, *range(len(tokens))])
        depth = depths[parent] + 1 if parent >= 0 else 0
        goes_on = depth < len(text) and rng.random() < 0.8
        token = spelt(compiler, text[depth])[0] if goes_on else rng.choice([300, 2, *spelt(compiler, 'x"}3 ')])
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
    return SpanDrafts(tokens, parents)


def way_to(tree: SpanDrafts, place: int) -> list[int]:
    """The tokens from the root down to this one."""
    return [*way_to(tree, tree.above(place)), tree.tokens[place]] if place >= 0 else []


@pytest.mark.parametrize("seed", range(4))
def test_masks_along_trees_are_those_of_each_path(compiler: GrammarCompiler, seed: int) -> None:
    """Each branch has states of its own, nothing is done below what the grammar excludes, and what is foretold stands
    behind the deepest that it allows; the matchers themselves have not moved."""
    made, _ = make(compiler, 0)
    rng, grammar = random.Random(seed), grammar_of(StructuredOutputsParams(**SHAPE, disable_any_whitespace=True))
    known = [[], spelt(compiler, '{"a'), []]
    trees = [random_tree(rng, compiler, text, 24) for text in ('{"a":"xy"}', '":"x"}', '{"a":3}')]
    made.begin([5, 6, 7], compiler.compile(grammar), known)
    bits = np.full((3 * 25, WIDTH // 32), 7, "<i4")
    for _ in range(2):
        assert made.fill([5, 6, 7], bits, trees) == []
        n_allowed = 0
        for at, (tokens, tree) in enumerate(zip(known, trees, strict=True)):
            for place in range(-1, 24):
                expected = alone(compiler, grammar, [*tokens, *way_to(tree, place)])
                assert (bits[25 * at + 1 + place] == expected).all(), (at, place)
                n_allowed += bool(expected.any())
        assert 6 < n_allowed < 60, "some nodes are allowed, and some are not"
        for one, tokens, tree in zip(made.foretell([5, 6, 7], bits, 9), known, trees, strict=True):
            ways = [way_to(tree, place) for place in range(-1, 24)]
            allowed = [way for way in ways if alone(compiler, grammar, [*tokens, *way]).any()]
            deepest = max(allowed, key=len)
            must = forced(compiler, grammar, [*tokens, *deepest])
            assert one.tokens == must and (not must or one.n_drafts == len(deepest))


def alone(compiler: GrammarCompiler, grammar: str, tokens: list[int]) -> np.ndarray:
    """What may follow these tokens; nothing if they may not be, or end the text."""
    matcher = compiler.compile(grammar)
    is_fine = all(matcher.accept(token) for token in tokens) and not matcher.is_complete
    return np.frombuffer(matcher.mask(), "<i4") if is_fine else np.zeros(WIDTH // 32, "<i4")


def test_what_is_foretold_is_where_masks_allow_one_token(compiler: GrammarCompiler) -> None:
    """Behind the last draft that may be; nothing where there is a choice, or nobody knows the sequence."""
    made, _ = make(compiler, 1)
    grammar = grammar_of(StructuredOutputsParams(**SHAPE, disable_any_whitespace=True))
    known = [[], spelt(compiler, '{"a'), spelt(compiler, '{"a":"x'), spelt(compiler, '{"')]
    drafts = [[], [], [], [*spelt(compiler, 'a":'), 300]]
    made.begin([5, 6, 7, 8], compiler.compile(grammar), known)
    rows, drafts = [1, 5, 6, 0, 7, 8], [[], *drafts[:2], [4], *drafts[2:]]
    bits = np.zeros((len(rows) + sum(map(len, drafts)), WIDTH // 32), "<i4")
    made.fill(rows, bits, chains(drafts))
    found = [(one.n_drafts, one.tokens) for one in made.foretell(rows, bits, 9)]
    assert [one.tokens for one in made.foretell(rows, bits, 1)] == [tokens[:1] for _, tokens in found]
    expected = [forced(compiler, grammar, tokens) for tokens in (known[0], known[1], known[2])]
    assert found[1:3] == [(0, expected[0]), (0, expected[1])] and all(expected[:2]) and expected[2] == []
    assert found[0][1] == forced(compiler, grammar_of(StructuredOutputsParams(regex="a+")), [])
    assert found[3][1] == found[4][1] == []
    assert found[5] == (3, forced(compiler, grammar, spelt(compiler, '{"a":')))


def forced(compiler: GrammarCompiler, grammar: str, tokens: list[int]) -> list[int]:
    """One mask after the other, as long as they allow one token."""
    tokens, n_known = list(tokens), len(tokens)
    while np.unpackbits(alone(compiler, grammar, tokens).view(np.uint8)).sum() == 1:
        tokens.append(first_token(alone(compiler, grammar, tokens)))
    return tokens[n_known:]


def test_slow_masks_along_drafts_end_nothing(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not made any more, and the sequence goes on as if nobody had guessed."""
    made, _ = make(compiler, 1)
    monkeypatch.setattr(matchers, "MASK_S", -10.0)
    bits, token = np.zeros((3, WIDTH // 32), "<i4"), spelt(compiler, "a")[0]
    made._live[1].budget.spare_s = 1e9
    made.fill([1], bits, chains([[token, token]]))
    assert bits[:2].any(1).all() and not bits[2].any(), "the first of them has taken all their time"
    made.fill([1], bits, chains([[token, token]]))
    assert bits[0].any() and not bits[1:].any()
    assert made.advance([(1, [token])]) == []


def test_masks_made_together_keep_to_what_is_left_for_drafts(compiler: GrammarCompiler) -> None:
    made, _ = make(compiler, 5)
    bits, token, rows = np.zeros((10, WIDTH // 32), "<i4"), spelt(compiler, "a")[0], [1, 2, 3, 4, 5]
    made._live[3].budget.ahead_s = -1.0
    for lines in ([], [8, 6, 4, 2, 0]):
        bits[:] = 7
        made.fill(rows, bits, chains([[token]] * 5), lines=lines)
        has_any = bits.any(1).reshape(5, 2)
        assert has_any[:, 0].all() and has_any[:, 1].tolist() == [True, True, False, True, True]
        assert len({line.tobytes() for line in bits[::2]}) == 1


def test_what_fails_behind_a_draft_fails_alone(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher that cannot go on from there allows nothing there; it has not failed here."""
    made, _ = make(compiler, 1)
    token = spelt(compiler, "a")[0]
    filled: list[Matcher] = []
    real = Matcher.fill

    def fill(self: Matcher, words: np.ndarray) -> None:
        filled.append(self)
        if len(filled) == 2:
            assert not self.accept(500) and self.error
        real(self, words)

    monkeypatch.setattr(Matcher, "fill", fill)
    bits = np.zeros((2, WIDTH // 32), "<i4")
    assert made.fill([1], bits, chains([[token]])) == []
    assert bits[0].any() and not bits[1].any()
    assert made.advance([(1, [token, token])]) == [] and made.fill([1], bits[:1]) == []
