"""Beams of an engine and of transformers on one random checkpoint: for tests of beam search on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_cases import IDS

from quire import LLM
from quire.core.beams import BeamSearchOutput, BeamSearchParams

PROMPTS = [IDS[:13], IDS[20:27], IDS[5:37]]
N_TOKENS = 24


def theirs(model: Any, prompt: list[int], width: int, end_ids: list[int], **options: Any) -> list[Any]:
    """[(output with its end token, score)] of each beam, best first."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=N_TOKENS, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
            eos_token_id=end_ids or None, **options,
        )  # fmt: skip
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        said = row[len(prompt) :]
        ends = [i for i, token in enumerate(said) if token in end_ids]
        beams.append((said[: ends[0] + 1] if ends else said, score))
    return beams


def ours(output: BeamSearchOutput, prompt: list[int], penalty: float) -> list[Any]:
    assert all(one.tokens[: len(prompt)] == prompt for one in output.sequences)
    said = [one.tokens[len(prompt) :] for one in output.sequences]
    return [
        (tokens, one.cum_logprob / len(tokens) ** penalty) for tokens, one in zip(said, output.sequences, strict=True)
    ]


def check_beams(
    llm: LLM, oracle: Any, width: int, penalty: float = 1.0, early: Any = False, *, with_ends: bool = False
) -> None:
    """The tokens and scores of all beams of `PROMPTS` are transformers', and nothing is held afterwards."""
    ends = end_tokens(llm) if with_ends else []
    llm._input_processor.end_token_ids[:] = ends
    params = BeamSearchParams(
        beam_width=width, max_tokens=N_TOKENS, length_penalty=penalty, early_stopping=early,
        include_stop_str_in_output=True,
    )  # fmt: skip
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = theirs(oracle, prompt, width, ends, length_penalty=penalty, early_stopping=early)
        found = ours(output, prompt, penalty)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
    if with_ends and penalty <= 1.0:  # a larger one prefers beams that go on to the end
        reasons = {one.finish_reason for output in outputs for one in output.sequences}
        assert "stop" in reasons, "no beam came upon an end token"
    assert_all_free(llm)


def assert_all_free(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.n_pages_free == stats.n_pages and stats.n_running == stats.n_waiting == 0
    assert llm.reset_prefix_cache(), "a page is held by nobody"


def end_tokens(llm: LLM) -> list[int]:
    """Tokens that beams come upon early, so that some end and some go on."""
    llm._input_processor.end_token_ids[:] = []
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=N_TOKENS))
    said = [one.tokens[len(prompt) :] for prompt, each in zip(PROMPTS, found, strict=True) for one in each.sequences]
    return sorted({said[0][6], said[5][4], said[9][9]})
