"""What drafts cost and bring: how many a step should verify so that it gains tokens a second, or none.

Owns the trade between the chance of a draft and the time of its row (Leviathan et al. 2023, section 3: with acceptance
α and γ drafts a step keeps (1 - α^(γ+1)) / (1 - α) tokens on average). Does not own chances (`control/acceptance.py`)
nor how times are measured (`compute/draft/timing.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Final

LEAST_GAIN: Final = 1.15
"""Of tokens a second, below which drafts are not worth their risk: rates are guesses."""
APART_GAIN: Final = 0.015
"""More for each doubling of sequences: those that began together end apart, so that the last ones run in small steps.
128 of the 8B shape on an H100: a gain of 1.17 was expected, 0.91 measured."""

LEAST_SHARE: Final = 0.05
LEAST_S: Final = 1e-9
"""Of what rows were measured to take at the start, and at all: no step takes less."""
LEAST_CHANCE: Final = 0.05
"""Of a draft that counts, below which none is given, however cheap its row."""


def expected_tokens(rate: float, n_drafts: int) -> float:
    """Tokens that a step keeps on average when each draft is right with the chance `rate`, and the ones before it."""
    return n_drafts + 1.0 if rate >= 1.0 else (1.0 - rate ** (n_drafts + 1)) / (1.0 - rate)


def least_gain(n_seqs: int) -> float:
    """Of tokens a second, from which drafts are worth their risk in a step of so many sequences."""
    return LEAST_GAIN + APART_GAIN * math.log2(max(1, n_seqs))


def _on_line(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Between two places on the line through them, also beyond the last two."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect.bisect_left(places, at), 1), len(places) - 1)
    (low, high), (low_value, high_value) = places[right - 1 : right + 1], values[right - 1 : right + 1]
    return low_value + (high_value - low_value) * (at - low) / (high - low)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCosts:
    """Times of one model on one machine, in seconds."""

    rows: tuple[int, ...]
    """Rows of decode steps that were measured, rising, the first 1."""
    step_s: tuple[float, ...]
    """Of these steps."""
    guess_s: float
    """Guessing one token of one sequence, beside others at its place."""
    exposed_s: tuple[float, ...] = (0.0,)
    """Of a step with drafts, beside its rows and guesses: what the host does before and after it, as nothing hides it
    where a step begins only when the one before it has ended; less where guesses of many take less than of one. A first
    guess: the engine sees how long steps take."""
    exposed_seqs: tuple[int, ...] = (1,)
    """Of how many sequences that was measured, rising."""
    place_s: float = 0.0
    """Guessing at one more place behind the known tokens, for however many sequences."""
    read_s: float = 0.0
    """Reading one known token that the drafter has not seen: before it guesses it reads all of them."""

    def seconds(self, n_rows: int) -> float:
        """Of a step with so many rows: between two that were measured on the line through them, also beyond the last
        two."""
        return max(self.step_s[0], _on_line(self.rows, self.step_s, n_rows))

    def exposed(self, n_seqs: int) -> float:
        """Of a step with drafts of so many sequences, as `exposed_s`; beyond those measured it never falls."""
        found_s = _on_line(self.exposed_seqs, self.exposed_s, n_seqs)
        return found_s if n_seqs <= self.exposed_seqs[-1] else max(found_s, self.exposed_s[-1])

    def guesses_s(self, lengths: Sequence[int]) -> float:
        """Of guessing so many tokens of each sequence."""
        return max(lengths, default=0) * self.place_s + sum(lengths) * self.guess_s

    def choose(
        self,
        rates: Sequence[float],
        most: int,
        n_rows: int,
        n_free: int,
        exposed_s: float,
        plain_s: float,
        by_place: Sequence[float] = (),
        least: float = 1.0,
    ) -> list[int]:
        """Drafts for each of some sequences in a step of `n_rows` rows without them: those that make tokens a second
        the most, all 0 if plain decoding has nearly as many.

        rates: the chance of each sequence's drafts. most: drafts of a sequence. n_free: drafts of all together.
        exposed_s, plain_s: of a step with drafts and of one without, what is beside rows and guesses. by_place: what a
        rate is multiplied with for the draft at each place, as those behind right ones are right more often or less.
        least: times the gain that is asked for; 0: the best that there is, even if plain decoding is faster.
        Rows go one by one to the sequence whose next draft has the best chance; of these ways to give some, the best is
        taken.
        """
        factors = by_place or [1.0] * most
        heap = [(-min(1.0, rate * factors[0]), i) for i, rate in enumerate(rates) if rate > 0]
        heapq.heapify(heap)
        tokens, extra_s = float(n_rows), exposed_s
        best = least * least_gain(n_rows) * n_rows / self.whole_s(n_rows, plain_s)
        given: list[int] = []
        n_best, deepest, lengths = 0, 0, [0] * len(rates)
        while heap and len(given) < n_free:
            chance, i = -heap[0][0], heap[0][1]
            if chance < LEAST_CHANCE:
                break
            given.append(i)
            lengths[i] += 1
            if lengths[i] < most:
                heapq.heapreplace(heap, (-chance * min(1.0, rates[i] * factors[lengths[i]]), i))
            else:
                heapq.heappop(heap)
            tokens += chance
            extra_s += self.guess_s + (self.place_s if lengths[i] > deepest else 0.0)
            deepest = max(deepest, lengths[i])
            speed = tokens / self.whole_s(n_rows + len(given), extra_s)
            if speed > best:
                n_best, best = len(given), speed
        for i in given[n_best:]:
            lengths[i] -= 1
        return lengths

    def whole_s(self, n_rows: int, beside_s: float) -> float:
        """Of a step of so many rows, and what was seen beside these, which may be less than nothing by as much as they
        take: a step takes more than that."""
        rows_s = self.seconds(n_rows)
        return max(rows_s + beside_s, LEAST_SHARE * rows_s, LEAST_S)
