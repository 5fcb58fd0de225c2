"""Beam search on a GPU, captured and kernel by kernel: in float32 the beams are transformers', in shared pages."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from beam_cases import N_TOKENS, PROMPTS, assert_all_free, check_beams, ours, theirs
from family_cases import random_checkpoint

from quire import LLM, SamplingParams
from quire.core.beams import BeamSearchParams

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128}


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_beams_are_those_of_transformers(tmp_path: pathlib.Path, eager: bool) -> None:
    oracle = random_checkpoint(tmp_path, "Llama")
    llm = LLM(str(tmp_path), enforce_eager=eager, max_num_seqs=32, num_gpu_blocks_override=400, **SIZE)
    for width, penalty, with_ends in ((2, 1.0, False), (8, 1.0, False), (4, 1.0, True), (4, 2.0, True)):
        check_beams(llm, oracle, width, penalty, with_ends=with_ends)
    llm.shutdown()


def test_beams_beside_others_in_few_pages(tmp_path: pathlib.Path) -> None:
    """Searches give way to each other and to samples, whose clients then leave."""
    oracle = random_checkpoint(tmp_path, "Llama")
    llm = LLM(
        str(tmp_path), max_num_seqs=9, block_size=16, num_gpu_blocks_override=19, max_num_batched_tokens=32, **SIZE
    )  # fmt: skip
    streams = [
        llm.stream(PROMPTS[i % 3], SamplingParams(n=2, temperature=1.0, seed=i, max_tokens=60, ignore_eos=True))
        for i in range(3)
    ]
    for stream in streams:
        next(stream)
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=4, max_tokens=N_TOKENS))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = theirs(oracle, prompt, 4, [], length_penalty=1.0, early_stopping=False)
        assert [tokens for tokens, _ in ours(output, prompt, 1.0)] == [tokens for tokens, _ in expected]
    assert llm.stats().preemptions > 0, "nobody gave way: the test says nothing"
    for stream in streams:
        stream.close()
    assert_all_free(llm)
    llm.shutdown()
