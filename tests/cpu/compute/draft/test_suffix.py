"""Suffix drafts against counting by hand over lists of tokens; tenants, memory, copies, and faults of a caller."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compute.draft.suffix import OWN_TOKENS, TAKEN_AT_ONCE, SuffixDrafter
from quire.compute.draft.suffix_tree import END, SuffixTree, most_bytes

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), max_size=5)


def places(string: list[int], text: list[int]) -> list[int]:
    """Where `string` stands in `text`."""
    return [at for at in range(len(text) - len(string) + 1) if text[at : at + len(string)] == string]


@dataclasses.dataclass
class Counting:
    """A suffix drafter that counts everything anew from lists. `texts`: earlier outputs, ended by END."""

    depth: int
    factor: float
    least: float
    texts: list[list[int]]

    def matched(self, tokens: list[int], texts: list[list[int]]) -> int:
        for length in range(min(self.depth, len(tokens)), 0, -1):
            if any(places(tokens[-length:], text) for text in texts):
                return length
        return 0

    def filled(self, tokens: list[int], texts: list[list[int]]) -> bool:
        """Do the last depth + 1 tokens stand in texts?"""
        return len(tokens) > self.depth and any(places(tokens[-self.depth - 1 :], text) for text in texts)

    def lasted(self, tokens: list[int], own: bool) -> int:
        """Tokens by which an ending of full depth went on, in the sequence itself or in the earlier outputs."""
        n = 0
        while self.filled(tokens, [tokens[:-1]] if own else self.texts):
            tokens = tokens[:-1]
            n += 1
        return n

    def walk(self, tokens: list[int], texts: list[list[int]], length: int, n: int) -> tuple[list[int], float]:
        said: list[int] = []
        probability, total = 1.0, 0.0
        while len(said) < n:
            context = (tokens[len(tokens) - length :] + said)[-self.depth :]
            after = [
                text[at + len(context)]
                for text in texts
                for at in places(context, text)
                if at + len(context) < len(text)
            ]
            if not after:
                break
            last = {token: i for i, token in enumerate(after)}
            token = max(last, key=lambda token: (after.count(token), last[token]))
            probability *= after.count(token) / len(after)
            if probability < self.least or token == END:
                break
            said.append(token)
            total += probability
        return said, total

    def answers(self, tokens: list[int], n: int) -> tuple[list[tuple[list[int], float]], list[int]]:
        """What each tree would say, with its sum; and how long each ending is."""
        found, lengths = [], []
        for own, texts in ((True, [tokens]), (False, self.texts)):
            length = self.matched(tokens, [tokens[:-1]] if own else texts)
            reach = length + (self.lasted(tokens, own) if length == self.depth else 0)
            limit = min(n, int(self.factor * reach))
            found.append(self.walk(tokens, texts, length, limit) if limit else ([], 0.0))
            lengths.append(length)
        return found, lengths


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def put_out(drafter: SuffixDrafter, text: list[int], salt: str = "", prompt: tuple[int, ...] = (9,)) -> None:
    """A sequence that came and went."""
    drafter.open(7, salt, len(prompt))
    drafter.close(7, ids([*prompt, *text]))


def check(said: list[int], found: list[tuple[list[int], float]]) -> None:
    """The guess with the larger sum, the sequence's own where they are equal; sums may differ by rounding."""
    (own, own_sum), (other, other_sum) = found
    if abs(own_sum - other_sum) < 1e-9:
        assert said in (own, other)
    else:
        assert said == (other if other_sum > own_sum else own)


@settings(max_examples=300, deadline=None)
@given(
    TEXTS,
    st.lists(st.integers(0, 2), min_size=1, max_size=45),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([0.0, 0.1, 0.4, 0.7]),
    st.integers(1, 12),
    st.data(),
)
def test_a_guess_is_what_counting_by_hand_finds(
    texts: list[list[int]], tokens: list[int], depth: int, factor: float, least: float, n: int, data: Any
) -> None:
    drafter = SuffixDrafter(max_tree_depth=depth, max_spec_factor=factor, min_token_prob=least)
    for text in texts:
        put_out(drafter, text)
    counting = Counting(depth, factor, least, [[*text, END] for text in texts if text])
    drafter.open(0, "", 1)
    length = data.draw(st.integers(1, len(tokens)))
    while length <= len(tokens):
        found, _ = counting.answers(tokens[:length], n)
        check(drafter.guess(0, ids(tokens[:length]), n), found)
        length += data.draw(st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=8, max_size=30), st.data())
def test_outputs_that_end_and_leave_meanwhile(texts: list[list[int]], tokens: list[int], data: Any) -> None:
    """Their tree changes under a sequence: the place is found again, and memory for some two outputs is kept."""
    longest = max((len(text) for text in texts), default=1)
    room = SuffixTree(6).n_bytes + 1_024 + 2 * most_bytes(max(1, longest))
    drafter = SuffixDrafter(max_tree_depth=6, max_bytes=room)
    counting = Counting(6, 1.0, 0.1, [])
    drafter.open(0, "", 1)
    waiting = list(texts)
    for length in range(1, len(tokens) + 1):
        if waiting and data.draw(st.booleans()):
            text = waiting.pop()
            put_out(drafter, text)
            counting.texts += [[*text, END]] if text else []
            kept = drafter._outputs[""].tree.n_texts if "" in drafter._outputs else 0
            assert kept >= min(1, len(counting.texts))
            counting.texts = counting.texts[len(counting.texts) - kept :]
        # Six tokens at most are asked for, so that how long an ending lasted does not matter.
        found, lengths = counting.answers(tokens[:length], 6)
        check(drafter.guess(0, ids(tokens[:length]), 6), found)
        if "" in drafter._outputs:
            assert drafter._sequences[0].place.length == lengths[1]


@pytest.mark.parametrize("from_outputs", [False, True])
def test_a_planted_copy_is_guessed_whole(from_outputs: bool) -> None:
    """300 tokens that stood before: as soon as some are there again, each guess is right, and long ones are made."""
    chance = random.Random(5)
    passage = [chance.randrange(1_000) for _ in range(300)]
    prompt = [chance.randrange(1_000) for _ in range(200)]
    drafter = SuffixDrafter()
    if from_outputs:
        put_out(drafter, [chance.randrange(1_000) for _ in range(100)] + passage)
    else:
        prompt[50:50] = passage
    drafter.open(0, "", len(prompt))
    tokens, steps, longest = [*prompt, *passage[:4]], 0, 0
    drafter.guess(0, ids(prompt), 1)
    while len(tokens) < len(prompt) + len(passage):
        said = drafter.guess(0, ids(tokens), 64)
        at = len(tokens) - len(prompt)
        right = passage[at : at + len(said)]
        assert said[: len(right)] == right
        longest = max(longest, len(said))
        tokens += passage[at : at + len(said) + 1]
        steps += 1
    # 4, 9, 19, 39 tokens known double with each step, then 64 are asked for.
    assert longest == 64 and steps <= 10


def test_an_ending_goes_on_lasting_while_other_outputs_end() -> None:
    passage = list(range(100, 200))
    drafter = SuffixDrafter(max_tree_depth=4)
    put_out(drafter, passage)
    drafter.open(0, "", 0)
    for length, said in ((3, 3), (4, 4), (5, 5), (9, 9)):
        assert drafter.guess(0, ids(passage[:length]), 50) == passage[length : length + said]
    put_out(drafter, [1, 2, 3])
    assert drafter.guess(0, ids(passage[:9]), 50) == passage[9:18]
    assert drafter.guess(0, ids([*passage[:10]]), 50) == passage[10:20]
    put_out(drafter, [1, 2, 3])
    assert drafter.guess(0, ids([*passage[:10], 7, *passage[10:14]]), 50) == passage[14:18], "it was interrupted"


def test_no_salt_sees_another() -> None:
    drafter = SuffixDrafter()
    put_out(drafter, [1, 2, 3, 4, 5, 6], salt="a")
    put_out(drafter, [1, 2, 3, 40, 50, 60], salt="b")
    for salt, said in (("a", [4, 5, 6]), ("b", [40, 50, 60]), ("", []), ("c", [])):
        drafter.open(0, salt, 3)
        assert drafter.guess(0, ids([1, 2, 3]), 3) == said
    drafter.open(3, "b", 3)
    assert drafter.guess(3, ids([1, 2, 3]), 3) == [40, 50, 60]
    drafter.open(3, "a", 3)
    assert drafter.guess(3, ids([1, 2, 3]), 3) == [4, 5, 6], "the slot has another tenant now"


def test_a_prompt_is_of_its_sequence_alone() -> None:
    drafter = SuffixDrafter()
    put_out(drafter, [7, 8], prompt=(1, 2, 3, 4))
    drafter.open(0, "", 3)
    assert drafter.guess(0, ids([1, 2, 3]), 3) == []


@pytest.mark.parametrize("max_bytes", [40_000, 150_000])
def test_memory_is_bounded_and_the_oldest_outputs_go_first(max_bytes: int) -> None:
    """Of any salt. What is kept is as if the others had never been."""
    chance = random.Random(3)
    drafter = SuffixDrafter(max_bytes=max_bytes)
    ended: list[tuple[str, list[int]]] = []
    n_gone = 0
    for _ in range(300):
        salt = chance.choice("aabc")
        text = [chance.randrange(chance.choice((2, 50, 1_000))) for _ in range(chance.randrange(1, 40))]
        put_out(drafter, text, salt=salt)
        ended.append((salt, text))
        held = sum(outputs.tree.n_bytes + 512 + 4 for outputs in drafter._outputs.values())
        assert drafter._n_bytes == held <= max_bytes
        n_kept = sum(outputs.tree.n_texts for outputs in drafter._outputs.values())
        assert 1 <= n_kept == len(drafter._order)
        n_gone = len(ended) - n_kept
        for one in "abc":
            texts = [text for salt, text in ended[n_gone:] if salt == one]
            outputs = drafter._outputs.get(one)
            kept = [token for text in texts for token in [*text, END]]
            assert (outputs.tree.tokens if outputs is not None else []) == kept
    assert n_gone > 50
    plain = SuffixDrafter()
    for salt, text in ended[n_gone:]:
        put_out(plain, text, salt=salt)
    for salt in "abc":
        for drafters in (drafter, plain):
            drafters.open(0, salt, 1)
        for _ in range(100):
            tokens = ids([chance.randrange(50) for _ in range(30)] + ended[-chance.randrange(1, 20)][1][:10])
            assert drafter.guess(0, tokens, 8) == plain.guess(0, tokens, 8)


def test_an_output_too_large_for_all_of_the_memory_is_not_kept() -> None:
    drafter = SuffixDrafter(max_bytes=20_000)
    put_out(drafter, [1, 2, 3, 4])
    put_out(drafter, list(range(1_000)))
    drafter.open(0, "", 3)
    assert drafter.guess(0, ids([1, 2, 3]), 1) == [4], "and takes no place from others"
    assert drafter.guess(0, ids([500, 501]), 1) == []


def test_tokens_that_do_not_go_on_begin_the_sequence_again() -> None:
    drafter = SuffixDrafter()
    put_out(drafter, [5, 6, 7])
    drafter.open(0, "", 1)
    assert drafter.guess(0, ids([1, 2, 3, 1, 2]), 4) == [3, 1]
    assert drafter.guess(0, ids([4, 2, 3, 1, 2]), 4) == [3], "another first token"
    assert drafter.guess(0, ids([4, 2, 3, 1, 2]), 4) == [3]
    assert drafter.guess(0, ids([1, 3]), 4) == [], "shorter"
    assert drafter.guess(0, ids([1, 3, 1]), 4) == [3]
    assert drafter.guess(0, ids([5, 6]), 4) == [7]


def test_a_long_prompt_is_taken_in_several_guesses() -> None:
    """What follows its first part is no guess for what follows all of it."""
    first = [*range(100, TAKEN_AT_ONCE + 90), *range(100, 110)]
    assert len(first) == TAKEN_AT_ONCE
    tokens = ids([*first, *range(50), 120, 121, 122])
    drafter = SuffixDrafter()
    drafter.open(0, "", len(tokens))
    assert drafter.guess(0, tokens, 8) == []
    assert drafter.guess(0, tokens, 8) == [123, 124, 125]


def test_an_output_that_ended_tells_nothing_to_follow() -> None:
    drafter = SuffixDrafter(min_token_prob=0.0)
    for text in ([1, 2], [1, 2], [1, 2, 3]):
        put_out(drafter, text)
    drafter.open(0, "", 1)
    assert drafter.guess(0, ids([1, 2]), 4) == [], "the end is the most frequent"
    assert drafter.guess(0, ids([1, 2]), 0) == []


def test_the_least_probability_is_that_of_the_path() -> None:
    """After 1: 2 in 3 of 4. After 1 2: 3 in 2 of 3. So 3/4, then 2/4."""
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5]]
    for least, said in ((0.76, []), (0.75, [2]), (0.51, [2]), (0.49, [2, 3])):
        drafter = SuffixDrafter(min_token_prob=least, max_spec_factor=2.0)
        for text in texts:
            put_out(drafter, text)
        drafter.open(0, "", 1)
        assert drafter.guess(0, ids([1]), 2) == said


def test_a_very_long_prompt_is_known_by_its_end() -> None:
    """The tree of one sequence has a limit; a copy within it is found, one before it is not."""
    rng = random.Random(3)
    near, far = [rng.randrange(1000) for _ in range(30)], [rng.randrange(1000) for _ in range(30)]
    filling = [rng.randrange(1000, 60_000) for _ in range(OWN_TOKENS - 100)]
    for copied, is_found in ((near, True), (far, False)):
        prompt = [*far, *range(70_000, 70_100), *near, *filling, *copied[:20]]
        drafter = SuffixDrafter()
        drafter.open(0, "", len(prompt))
        tokens = np.array(prompt, np.int32)
        for _ in range(1 + OWN_TOKENS // TAKEN_AT_ONCE):
            found = drafter.guess(0, tokens, 10)
        assert (found == copied[20:30]) == is_found
