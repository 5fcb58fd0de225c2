"""What is drawn with drafts has the model's distribution: χ² over whole outputs, against float64 from its logprobs.

Seeds are fixed, so nothing here is left to chance once it has passed. Logprobs do not tell what a repetition penalty
multiplies: that tokens under it are the same with drafts is shown by `test_speculative.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from worker_rank import CONFIG

from quire import LLM, SamplingParams
from quire.compute.draft.drafter import DraftContext

pytestmark = pytest.mark.usefixtures("timed_briefly")

PROMPT = [3, 17, 4, 17, 4, 17, 5, 9]
N_OUTPUTS, N_TOKENS, KEPT = 600, 4, 3
N_AT_ONCE = 16
"""Of 64 that there is room for, so that each may have drafts."""
TOP: dict[str, Any] = {"top_k": KEPT, "temperature": 0.3}
FEW: dict[str, Any] = {"allowed_token_ids": [9, 17, 27, 60, 188], "temperature": 0.3}
WISHES: dict[str, dict[str, Any]] = {
    "top-k": TOP,
    "top-p": FEW | {"top_p": 0.8},
    "min-p": FEW | {"min_p": 0.1},
    "presence": TOP | {"presence_penalty": 0.3},
    "frequency": TOP | {"frequency_penalty": 0.3},
    "bias": TOP | {"logit_bias": {40: 3.0, 41: 2.5, 42: 3.2}},
    "allowed": TOP | {"allowed_token_ids": [9, 17, 60, 61]},
}

Chances = dict[tuple[int, ...], float]
"""Every output and its chance."""


class FixedDrafter:
    """Guesses the same tokens behind every prompt, whatever was drawn: often right, often wrong in the middle."""

    def __init__(self, said: list[int]) -> None:
        self._said = said

    def open(self, slot: int, salt: str, prompt_len: int) -> None: ...

    def close(self, slot: int, tokens: np.ndarray) -> None: ...

    def guess(self, contexts: list[DraftContext]) -> list[list[int]]:
        return [self._said[len(one.tokens) - len(PROMPT) :][: one.most] for one in contexts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float32"}))
    return made


def engine(folder: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", device="cpu", skip_tokenizer_init=True, max_logprobs=1000, **options)


@pytest.fixture(scope="module")
def plain(folder: pathlib.Path) -> Iterator[LLM]:
    llm = engine(folder)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def drafting(folder: pathlib.Path) -> Iterator[LLM]:
    llm = engine(
        folder,
        speculative_config={
            "method": "ngram", "num_speculative_tokens": N_TOKENS, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
        },
    )  # fmt: skip
    llm.engine.scheduler.live.drafts.costs = None
    yield llm
    llm.shutdown()


def chances(plain: LLM, said: tuple[int, ...], wish: dict[str, Any]) -> dict[int, float]:
    """float64: token → its chance behind the prompt and `said`, by the definitions of the parameters."""
    tokens = [*PROMPT, *said]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=CONFIG["vocab_size"], ignore_eos=True)
    (line,) = plain.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0].outputs[0].logprobs
    logits = np.full(CONFIG["vocab_size"], -np.inf)
    for token, one in line.items():
        logits[token] = one.logprob
    if "allowed_token_ids" in wish:
        logits[np.setdiff1d(np.arange(len(logits)), wish["allowed_token_ids"])] = -np.inf
    for token, value in wish.get("logit_bias", {}).items():
        logits[token] += value
    for token in said:
        logits[token] -= wish.get("frequency_penalty", 0.0)
    logits[list(set(said))] -= wish.get("presence_penalty", 0.0)
    logits /= wish["temperature"]
    order = np.argsort(-logits, kind="stable")
    p = np.exp(logits - logits.max())
    kept = order[: wish.get("top_k", len(p))]
    p[np.setdiff1d(order, kept)] = 0.0
    p /= p.sum()
    p[p < wish.get("min_p", 0.0) * p.max()] = 0.0
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= wish.get("top_p", 1.0)]] = 0.0
    return {int(token): float(p[token] / p.sum()) for token in np.flatnonzero(p)}


def expected(plain: LLM, wish: dict[str, Any]) -> Chances:
    """Every output of `N_TOKENS` tokens and its chance."""
    found = {(): 1.0}
    for _ in range(N_TOKENS):
        found = {
            (*said, token): whole * p
            for said, whole in found.items()
            for token, p in chances(plain, said, wish).items()
        }
    return found


def drawn(llm: LLM, wish: dict[str, Any]) -> list[tuple[int, ...]]:
    params = [SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, seed=seed, **wish) for seed in range(N_OUTPUTS)]
    found = []
    for at in range(0, N_OUTPUTS, N_AT_ONCE):
        some = params[at : at + N_AT_ONCE]
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(some), some, use_tqdm=False)
        found += [tuple(one.outputs[0].token_ids) for one in outputs]
    return found


def deviation(found: list[tuple[int, ...]], chance: Chances) -> float:
    """How many standard deviations χ² lies above its mean; outputs that are expected less than five times are one
    cell. Infinite if one is found that cannot be."""
    if not set(found) <= set(chance):
        return float("inf")
    large = {said: n for said, p in chance.items() if (n := p * len(found)) >= 5}
    counts = [(sum(one == said for one in found), n) for said, n in large.items()]
    rest = len(found) - sum(n for n, _ in counts), len(found) - sum(n for _, n in counts)
    cells = [*counts, rest] if rest[1] >= 1 else counts
    square = sum((n - wanted) ** 2 / wanted for n, wanted in cells)
    free = len(cells) - 1
    return float((square - free) / (2 * free) ** 0.5)


@pytest.fixture
def told(drafting: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[Chances], None]:
    """The drafter says the likeliest output, and not what n-grams say."""

    def tell(chance: Chances) -> None:
        said = list(max(chance, key=chance.__getitem__))
        monkeypatch.setattr(drafting.engine.executor.worker.runner._lengths, "_drafter", FixedDrafter(said))

    return tell


@pytest.fixture(scope="module")
def of_wish(plain: LLM) -> Callable[[str], Chances]:
    return functools.cache(lambda name: expected(plain, WISHES[name]))


@pytest.mark.parametrize("drafter", ["fixed", "ngram"])
@pytest.mark.parametrize("name", WISHES)
def test_outputs_have_the_models_distribution(
    drafting: LLM, of_wish: Callable[[str], Chances], told: Any, name: str, drafter: str
) -> None:
    chance, before = of_wish(name), drafting.stats()
    if drafter == "fixed":
        told(chance)
    assert len(chance) >= 8, "there is something to draw"
    found, after = drawn(drafting, WISHES[name]), drafting.stats()
    n_drafts, n_right = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    assert 0.1 * n_drafts < n_right < 0.9 * n_drafts, "some drafts were right, and some wrong"
    assert deviation(found, chance) < 4


@pytest.mark.parametrize("drafter", ["fixed", "ngram"])
def test_a_rule_that_keeps_too_much_is_found(
    drafting: LLM, of_wish: Callable[[str], Chances], told: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that count with a chance of their own, whatever is chosen."""
    chance, lengths = of_wish("top-k"), drafting.engine.executor.worker.runner._lengths
    if drafter == "fixed":
        told(chance)
    monkeypatch.setattr(lengths, "_chance", 0.6)
    assert deviation(drawn(drafting, TOP), chance) > 8


@pytest.mark.parametrize("drafter", ["fixed", "ngram"])
def test_the_random_numbers_of_a_wrong_place_are_found(
    drafting: LLM, of_wish: Callable[[str], Chances], told: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that draw with the number of the place before: tokens behind a draft follow from the draft's own number."""
    chance, table = of_wish("top-k"), drafting.engine.executor.worker.runner.tail._sampler._table
    if drafter == "fixed":
        told(chance)
    real = table.controls
    monkeypatch.setattr(table, "controls", lambda slots, positions: real(slots, np.full_like(positions, positions[0])))
    assert deviation(drawn(drafting, TOP), chance) > 8


def test_frequency_is_not_presence(plain: LLM, of_wish: Callable[[str], Chances]) -> None:
    """Repeats are likely enough that the two penalties have distributions of their own, and neither is without one."""
    names = ("frequency", "presence", "top-k")
    chances = [of_wish(name) for name in names]
    repeats = sum(p for said, p in chances[0].items() if len(set(said)) < N_TOKENS)
    assert repeats > 0.8
    for name, own in zip(names[:2], chances[:2], strict=True):
        found = drawn(plain, WISHES[name])
        assert deviation(found, own) < 4 < 8 < min(deviation(found, other) for other in chances if other is not own)


def test_the_measure_itself(plain: LLM, of_wish: Callable[[str], Chances]) -> None:
    """Plain decoding passes it, and another temperature does not."""
    chance, hotter = of_wish("top-k"), expected(plain, TOP | {"temperature": 0.6})
    found = drawn(plain, TOP)
    assert deviation(found, chance) < 4 < deviation(found, hotter)
    assert sum(chance.values()) == pytest.approx(1.0)
    assert all(len(one) == N_TOKENS for one in itertools.islice(found, 10))
