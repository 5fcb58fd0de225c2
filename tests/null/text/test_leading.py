"""The bound on what comes before a constraint: reasoning ends at its budget, on whole characters, and only then."""

from __future__ import annotations

import numpy as np
import pytest
from small_tokenizers import byte_level

from quire.core.errors import InvalidParameter
from quire.core.structured import StructuredOutputsParams
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.leading import lead_bound
from quire.text.matchers import End, Matchers
from quire.text.tokenizer import HfTokenizer

MARK, FIRST = "</think>", "<think>"
FREE = End(1, is_free=True)


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer(byte_level(), {"type": "ByteLevel"}, {"eos_token": "</s>"})


def run(tokenizer: HfTokenizer, text: str, params: StructuredOutputsParams, n_most: int = 200) -> tuple[str, End]:
    """(what comes out of a model that wants to write `text`, how its matcher ended). Where the model's token is not
    allowed the first one that is comes instead."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_id or 0])
    bound = lead_bound(params)
    made = Matchers([0])
    ends = made.begin([1], compiler.compile(grammar_of(params)), [[]], lambda: bound and compiler.leading(bound))
    wanted, out = tokenizer.encode(text), []
    bits = np.zeros((1, -(-len(tokenizer) // 32)), "<i4")
    while wanted and not ends and len(out) < n_most:
        ends = made.fill([1], bits)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
        token = wanted.pop(0) if wanted[0] in allowed else int(allowed[0])
        out.append(token)
        ends += made.advance([(1, [token])])
    return tokenizer.decode(out, skip_special_tokens=False), ends[0]


THOUGHT = "the quick brown fox jumps over the lazy dog and goes on and on"


@pytest.mark.parametrize("budget", [0, 1, 5, 9])
def test_it_ends_at_the_budget(tokenizer: HfTokenizer, budget: int) -> None:
    kept = tokenizer.decode(tokenizer.encode(THOUGHT)[:budget], skip_special_tokens=False)
    text, end = run(tokenizer, THOUGHT, StructuredOutputsParams(begins_after=MARK, begins_within=budget))
    assert (text, end) == (kept + MARK, FREE)


def test_who_ends_earlier_is_left_alone(tokenizer: HfTokenizer) -> None:
    text, end = run(tokenizer, f"a {MARK}b", StructuredOutputsParams(begins_after=MARK, begins_within=50))
    assert (text, end) == (f"a {MARK}", FREE), "what follows needs no mask"


def test_the_constraint_follows(tokenizer: HfTokenizer) -> None:
    params = StructuredOutputsParams(choice=["yes"], begins_after=MARK, begins_within=4)
    text, end = run(tokenizer, THOUGHT, params)
    assert text.partition(MARK)[2].strip() == "yes" and end == End(1)


@pytest.mark.parametrize("budget", range(1, 12))
def test_no_character_is_cut(tokenizer: HfTokenizer, budget: int) -> None:
    """A mark amid the bytes of a character would be no text, and end the sequence."""
    text, end = run(tokenizer, "𝄞𝄢𝄪𝄫" * 9, StructuredOutputsParams(begins_after=MARK, begins_within=budget))
    assert end == FREE and "\ufffd" not in text and text.endswith(MARK)


def test_text_without_reasoning_is_free(tokenizer: HfTokenizer) -> None:
    params = StructuredOutputsParams(begins_after=MARK, may_begin_with=FIRST, begins_within=3)
    text, end = run(tokenizer, THOUGHT, params)
    assert end == FREE and THOUGHT.startswith(text)
    text, end = run(tokenizer, FIRST + THOUGHT, params)
    assert end == FREE and text.startswith(FIRST) and text.endswith(MARK) and len(text) < len(FIRST + THOUGHT)


@pytest.mark.parametrize("fields", [{"begins_within": 5}, {"begins_after": MARK, "begins_within": -1}])
def test_a_bound_needs_its_mark(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter):
        StructuredOutputsParams(**fields).verify()  # type: ignore[arg-type]
