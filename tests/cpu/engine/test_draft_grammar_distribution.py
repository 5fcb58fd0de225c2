"""Tokens under a grammar have the distribution of the model over what the grammar allows, with drafts as without: χ² of
whole outputs against float64, from logprobs of plain decoding. Seeds are fixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from speculative_cases import METHODS, TREES
from test_draft_distribution import deviation
from test_draft_trees_grammar import masks_of_the_row_before

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.text.grammar import GrammarCompiler, grammar_of

pytestmark = pytest.mark.usefixtures("timed_briefly")

VOCAB, END = 4096, 2
"""Of the demo model."""
PROMPT = "Letters: a,b,c,d,b,a,d,c,a,c,b,d,d,b,a,c,c,a,d,b,b,c,d,a,"
GRAMMAR = StructuredOutputsParams(regex="([a-d],){3}")
N, N_AT_ONCE = 192, 16
WISHES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
}
LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFTERS = {name: config | (LOOKUP if name == "ngram" else {}) for name, config in (METHODS | TREES).items()}
Chances = dict[tuple[int, ...], float]


def drafting(name: str) -> LLM:
    llm = LLM("", max_num_seqs=64, speculative_config=DRAFTERS[name])
    llm.engine.scheduler.live.drafts.costs = None  # as many as there is room for
    return llm


def allowed_outputs(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """What may have been said → the tokens that may follow; none: the text is complete. By matchers."""
    compiler = GrammarCompiler(llm.tokenizer, VOCAB, [END])
    found, waiting = {}, [((), compiler.compile(grammar_of(GRAMMAR)))]
    while waiting:
        said, matcher = waiting.pop()
        bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
        found[said] = [] if matcher.is_complete else np.flatnonzero(bits).tolist()
        for token in found[said]:
            after = matcher.copy()
            assert after.accept(token)
            waiting.append(((*said, token), after))
    return found


def expected(llm: LLM, wish: dict[str, Any]) -> Chances:
    """Every output that the grammar allows, and its chance: float64, by the definitions of the parameters."""
    follow, prompt = allowed_outputs(llm), llm.tokenizer.encode(PROMPT)
    wholes = [said for said, tokens in follow.items() if not tokens]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    asked = [{"prompt_token_ids": [*prompt, *said]} for said in wholes]
    logprob: dict[tuple[int, ...], float] = {}
    for said, answer in zip(wholes, llm.generate(asked, params, use_tqdm=False), strict=True):
        for n, (token, line) in enumerate(zip(said, answer.prompt_logprobs[len(prompt) :], strict=True), 1):
            logprob[said[:n]] = line[token].logprob
    found = {(): 1.0}
    for said in sorted(follow, key=len):
        if follow[said]:
            tokens = np.array(follow[said])
            p = np.exp(np.array([logprob[*said, token] for token in follow[said]]) / wish["temperature"])
            p /= p.sum()
            order = np.argsort(-p, kind="stable")
            p[order[np.cumsum(p[order]) - p[order] >= wish.get("top_p", 1.0)]] = 0.0
            whole = found.pop(said)
            found |= {(*said, int(token)): whole * share for token, share in zip(tokens, p / p.sum(), strict=True)}
    return {said: p for said, p in found.items() if p}


@pytest.fixture(scope="module")
def chances() -> Iterator[dict[str, Chances]]:
    llm = LLM("")
    yield {name: expected(llm, wish) for name, wish in WISHES.items()}
    llm.shutdown()


def drawn(llm: LLM, wish: dict[str, Any], first_seed: int) -> list[tuple[int, ...]]:
    """Outputs of other seeds than another drafter's; () where the grammar was left."""
    params = [SamplingParams(max_tokens=8, seed=first_seed + i, structured_outputs=GRAMMAR, **wish) for i in range(N)]
    found = []
    for at in range(0, N, N_AT_ONCE):
        outputs = llm.generate([PROMPT] * N_AT_ONCE, params[at : at + N_AT_ONCE], use_tqdm=False)
        ends = [one.outputs[0] for one in outputs]
        found += [tuple(one.token_ids) if one.finish_reason == "stop" else () for one in ends]
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_is_that_of_the_model(chances: dict[str, Chances], name: str) -> None:
    llm, seed = drafting(name), 1000 * list(DRAFTERS).index(name)
    for wish, chance in chances.items():
        assert sum(chance.values()) == pytest.approx(1.0) and len(chance) >= 10, "there is something to draw"
        before = llm.stats()
        found, after = drawn(llm, WISHES[wish], seed), llm.stats()
        n_drafts, n_right = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
        assert n_drafts > 2 * N and 0.1 * n_drafts < n_right < 0.9 * n_drafts, "some were right, and some wrong"
        assert deviation(found, chance) < 4, wish
    llm.shutdown()


@pytest.mark.parametrize("name", ["ngram", "eagle3 tree"])
def test_a_stale_state_of_the_grammar_is_found(
    chances: dict[str, Chances], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks_of_the_row_before(monkeypatch)
    llm = drafting(name)
    assert deviation(drawn(llm, WISHES["temperature"], 0), chances["temperature"]) > 8
    llm.shutdown()


def test_the_measure_itself(chances: dict[str, Chances]) -> None:
    """Plain decoding passes it; hotter, it does not."""
    llm = LLM("")
    chance = chances["temperature"]
    assert deviation(drawn(llm, WISHES["temperature"], 0), chance) < 4
    assert deviation(drawn(llm, {"temperature": 1.2}, 0), chance) > 8
    llm.shutdown()
