"""Which tokens may follow given logits that are only known up to an error: the judge of greedy and sampled tokens.

Written from the definitions in core/sampling.py and kernels/sample/op.py in float64, without the engine's code; only
the counter-based random number is shared. Penalties and edits are included.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from quire.core.request import Request
from quire.core.sampling import MAX_SEED
from quire.kernels.sample.draw import GREEDY_BELOW, keyed_uniform, seed_key

ROUNDING: Final = 4e-6
"""Of cumulative probabilities, besides what errors of logits do to them."""


@dataclasses.dataclass(slots=True)
class Control:
    """How the tokens of one sequence are chosen."""

    request: Request
    index: int

    @property
    def slack(self) -> float:
        """Factor by which edits can enlarge an error of the logits."""
        repetition = self.request.params.repetition_penalty
        return max(1.0, repetition, 1 / repetition)

    @property
    def is_greedy(self) -> bool:
        return self.request.params.temperature < GREEDY_BELOW

    def uniform(self, position: int) -> float:
        """The random number of the token at `position`."""
        seed = (self.request.seed + self.index) % (MAX_SEED + 1)
        return float(keyed_uniform(seed_key(np.array([seed])), np.array([position]))[0])

    def edited(self, row: np.ndarray, known: list[int]) -> np.ndarray:
        """float64 [vocab]: the logits `row` after edits and penalties, for the token that follows `known`."""
        params, prompt_len = self.request.params, len(self.request.prompt_token_ids)
        x = row.copy()
        if params.allowed_token_ids is not None:
            x = np.full_like(row, -np.inf)
            x[params.allowed_token_ids] = row[params.allowed_token_ids]
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        for phrase in self.request.bad_token_seqs:
            if known[len(known) - len(phrase) + 1 :] == phrase[:-1] and len(known) >= len(phrase) - 1:
                x[phrase[-1]] = -np.inf
        if len(known) - prompt_len < params.min_tokens:
            x[[*self.request.end_token_ids, *params.stop_token_ids]] = -np.inf
        if params.repetition_penalty != 1:
            for token in set(known):
                x[token] = (
                    x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
                )
        if params.frequency_penalty or params.presence_penalty:
            ids, counts = np.unique(np.array(known[prompt_len:], np.int64), return_counts=True)
            x[ids] -= params.frequency_penalty * counts + params.presence_penalty
        return x


def explains(control: Control, x: np.ndarray, token: int, position: int, error: float) -> bool:
    """True if `token` can be the right choice from edited logits that differ from `x` by at most `error` each."""
    error *= control.slack
    if control.is_greedy:
        return bool(x[token] >= x.max() - 2 * error)
    low, high = _interval(control, x, token, error)
    return bool(low - ROUNDING <= control.uniform(position) <= high + ROUNDING)


def is_best(control: Control, x: np.ndarray, token: int, position: int) -> bool:
    """True if `token` is the choice from exactly `x`."""
    if control.is_greedy:
        return token == int(x.argmax())
    low, high = _interval(control, x, token, 0.0)
    return bool(low <= control.uniform(position) < high)


def _interval(control: Control, x: np.ndarray, token: int, error: float) -> tuple[float, float]:
    """Bounds on the cumulative probability before and after `token`; empty (1, 0) if it cannot be kept."""
    temperature = float(np.float32(control.request.params.temperature))
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((x - x.max()) / temperature)
    stretch = np.exp(min(2 * error / temperature, 300.0))
    sure, possible = _kept(control, x, weights, temperature, error, stretch)
    if not possible[token]:
        return 1.0, 0.0
    sure_weights, doubtful = np.where(sure, weights, 0), np.where(possible & ~sure, weights, 0)
    before, after = sure_weights[:token].sum(), sure_weights[token + 1 :].sum()
    doubt_before, doubt_after = doubtful[:token].sum(), doubtful[token + 1 :].sum()
    own = weights[token]
    # an error of one sign before the token and of the other from it on moves the border most
    low = before / max(before + (own + after + doubt_after) * stretch, 1e-300)
    upto = (before + doubt_before + own) * stretch
    return low, upto / max(upto + after, 1e-300)


def _kept(
    control: Control, x: np.ndarray, weights: np.ndarray, temperature: float, error: float, stretch: float
) -> tuple[np.ndarray, np.ndarray]:
    """bool [vocab] twice: tokens that min_p, top_k and top_p keep for certain, and those that they may keep."""
    params, floor = control.request.params, -np.inf
    if params.min_p > 0:
        floor = x.max() + temperature * np.log(float(np.float32(params.min_p)))
    if 0 < params.top_k < len(x):
        floor = max(floor, float(np.partition(x, len(x) - params.top_k)[len(x) - params.top_k]))
    width = 2 * error + (1e-5 * max(1.0, abs(floor)) if error and np.isfinite(floor) else 0.0)
    possible = (x >= floor - width) & (x > -np.inf)
    sure = (x > floor + width) & (x > -np.inf) if error else possible  # none, where even the best is at the border
    if params.top_p < 1:
        top_p, slack = float(np.float32(params.top_p)), ROUNDING if error else 0.0
        least, most = np.where(sure, weights, 0), np.where(possible, weights, 0)
        surely_above = _above(x, least, 2 * error) / (stretch * most.sum())
        maybe_above = stretch * _above(x, most, -2 * error) / least.sum() if sure.any() else np.inf
        sure, possible = sure & (maybe_above < top_p - slack), possible & (surely_above < top_p + slack)
    return sure, possible


def _above(x: np.ndarray, weights: np.ndarray, margin: float) -> np.ndarray:
    """For each logit, the weight of others that exceed it by more than `margin` (margin < 0: from that much below)."""
    order = np.argsort(-x, kind="stable")
    cumulative = np.concatenate(([0.0], weights[order].cumsum()))
    if margin >= 0:
        return cumulative[np.searchsorted(-x[order], -(x + margin), side="left")]
    return cumulative[np.searchsorted(-x[order], -(x + margin), side="right")] - weights
