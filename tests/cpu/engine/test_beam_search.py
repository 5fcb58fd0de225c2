"""Beam search against transformers' own on random checkpoints: the same tokens and scores, in shared pages."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from beam_cases import N_TOKENS, PROMPTS, assert_all_free, check_beams, ours, theirs
from family_cases import CASES as FAMILY_CASES
from family_cases import IDS, random_checkpoint

from quire import LLM, SamplingParams
from quire.core.beams import BeamSearchParams, BeamTerms
from quire.core.errors import ContextLengthExceeded, InvalidParameter
from quire.core.structured import StructuredOutputsParams
from quire.engine.input_processor import Checked

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": FAMILY_CASES["gemma2"],
    "gpt2": FAMILY_CASES["gpt2"],
}
"""Plain (the fused step of a CPU), one with windows, and one with learned positions."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine, and transformers' model of the same checkpoint."""
    folder: pathlib.Path = tmp_path_factory.mktemp(request.param)
    family, fields = FAMILIES[request.param]
    oracle = random_checkpoint(folder, family, **fields)
    engine = LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=32)
    yield engine, oracle
    engine.shutdown()


CASES = [(2, 1.0, False), (4, 1.0, False), (8, 1.0, False), (4, 0.0, "never"), (4, 2.0, "never"), (4, 0.6, True)]


@pytest.mark.parametrize(("width", "penalty", "early"), CASES)
@pytest.mark.parametrize("with_ends", [False, True], ids=["endless", "with end tokens"])
def test_beams_are_those_of_transformers(pair: Any, width: int, penalty: float, early: Any, with_ends: bool) -> None:
    check_beams(*pair, width, penalty, early, with_ends=with_ends)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine with few pages and small steps, and transformers' model."""
    folder: pathlib.Path = tmp_path_factory.mktemp("tight")
    oracle = random_checkpoint(folder, "Llama")
    engine = LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=9, block_size=8,
        num_gpu_blocks_override=31, max_num_batched_tokens=24,
    )  # fmt: skip
    yield engine, oracle
    engine.shutdown()


def test_beams_beside_others_in_few_pages(tight: Any) -> None:
    """Searches give way to each other and to samples, compute again, and find what they find alone."""
    llm, oracle = tight
    streams = [
        llm.stream(PROMPTS[i % 3], SamplingParams(n=2, temperature=1.0, seed=i, max_tokens=40, ignore_eos=True))
        for i in range(3)
    ]
    for stream in streams:
        next(stream)
    before = llm.stats().preemptions
    params = BeamSearchParams(beam_width=4, max_tokens=N_TOKENS)
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = theirs(oracle, prompt, 4, [], length_penalty=1.0, early_stopping=False)
        assert [tokens for tokens, _ in ours(output, prompt, 1.0)] == [tokens for tokens, _ in expected]
    assert llm.stats().preemptions > before, "nobody gave way: the test says nothing"
    for stream in streams:
        stream.close()
    assert_all_free(llm)


def test_a_search_that_can_never_run_is_refused(tight: Any) -> None:
    llm, _ = tight
    with pytest.raises(InvalidParameter, match="max_num_seqs = 9"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=10, max_tokens=4))
    with pytest.raises(ContextLengthExceeded, match="8 beams of a prompt"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=8, max_tokens=60))
    with pytest.raises(InvalidParameter, match="early_stopping"):
        BeamSearchParams(beam_width=2, max_tokens=4, early_stopping="always")  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    with pytest.raises(InvalidParameter, match="concurrency_limit"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4), concurrency_limit=0)
    assert_all_free(llm)


def test_what_would_change_a_search_is_refused_in_words(tight: Any) -> None:
    """As a client meets it, who knows no None and none of our types."""
    llm, _ = tight
    for name, value, said in (
        (
            "structured_outputs",
            StructuredOutputsParams(regex="a+"),
            "cannot be used with beam search: leave one of the two out.",
        ),
        ("bad_words", ["x"], "= ['x'] is not allowed: it must be left out with beam search."),
    ):
        params = SamplingParams(temperature=0, **{name: value})
        with pytest.raises(InvalidParameter) as error:
            llm._input_processor.request([1], params, beams=BeamTerms(2), checked=Checked([]))
        assert error.value.message == f"{name} {said}"


def test_a_beam_of_one_is_greedy(tight: Any) -> None:
    llm, _ = tight
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=N_TOKENS), use_tqdm=False)
    beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=N_TOKENS), concurrency_limit=2)
    for prompt, one, other in zip(PROMPTS, greedy, beams, strict=True):
        assert other.sequences[0].tokens == prompt + one.outputs[0].token_ids
        rows = other.sequences[0].logprobs
        assert sum(row[token].logprob for row, token in zip(rows, one.outputs[0].token_ids, strict=True)) == (
            pytest.approx(other.sequences[0].cum_logprob, abs=1e-4)
        )


def test_beams_share_pages(tight: Any) -> None:
    """What a search holds is said while it runs: its prompt once, and tails."""
    llm, _ = tight
    saved: list[int] = []
    llm.on_step = lambda record: saved.append(llm.stats().n_pages_saved)
    llm.beam_search([PROMPTS[2]], BeamSearchParams(beam_width=4, max_tokens=N_TOKENS))
    llm.on_step = None
    assert saved[0] == 0 and max(saved) >= 3 * (len(PROMPTS[2]) // 8), "the prompt is held more than once"


def test_beams_beside_drafts(tmp_path: pathlib.Path) -> None:
    """Others verify drafts in the steps in which beams fork; the beams themselves take none."""
    oracle = random_checkpoint(tmp_path, "Llama")
    llm = LLM(
        str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    )  # fmt: skip
    repeating = (IDS[:6] * 9)[:50]
    stream = llm.stream(repeating, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    next(stream)
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=N_TOKENS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = theirs(oracle, prompt, 3, [], length_penalty=1.0, early_stopping=False)
        assert [tokens for tokens, _ in ours(output, prompt, 1.0)] == [tokens for tokens, _ in expected]
    said = [token for part in stream for token in part.outputs[0].token_ids]
    plain = oracle.generate(torch.tensor([repeating]), do_sample=False, max_new_tokens=60, pad_token_id=0)
    assert said == plain[0, -len(said) :].tolist()
    assert_all_free(llm)
    llm.shutdown()
