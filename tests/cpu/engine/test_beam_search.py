"""Beam search against transformers' own on random checkpoints: the same tokens and scores, in shared pages."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from family_cases import CASES as FAMILY_CASES
from family_cases import IDS, random_checkpoint

from quire import LLM
from quire.core.beams import BeamSearchOutput, BeamSearchParams

PROMPTS = [IDS[:13], IDS[20:27], IDS[5:37]]
N_TOKENS = 24
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": FAMILY_CASES["gemma2"],
    "gpt2": FAMILY_CASES["gpt2"],
}
"""Plain (the fused step of a CPU), one with windows, and one with learned positions."""


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
def test_beams_are_those_of_transformers(
    pair: Any, width: int, penalty: float, early: Any, with_ends: bool
) -> None:
    llm, oracle = pair
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
    stats = llm.stats()
    assert stats.n_pages_free == stats.n_pages and stats.n_running == 0


def end_tokens(llm: LLM) -> list[int]:
    """Tokens that beams come upon early, so that some end and some go on."""
    llm._input_processor.end_token_ids[:] = []
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=N_TOKENS))
    said = [one.tokens[len(prompt) :] for prompt, each in zip(PROMPTS, found, strict=True) for one in each.sequences]
    return sorted({said[0][6], said[5][4], said[9][9]})
