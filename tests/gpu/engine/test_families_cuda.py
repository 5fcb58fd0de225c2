"""Every family on a GPU in float32: 64 greedy tokens and prompt logprobs of transformers, eager and with graphs."""

from __future__ import annotations

import pathlib

import pytest
import torch
from family_cases import CASES, IDS, checkpoint_of

from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

pytestmark = pytest.mark.gpu
SIZE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 65, "skip_tokenizer_init": True}
N_PROMPT = 40


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, tmp_path: pathlib.Path) -> None:
    oracle = checkpoint_of(case, tmp_path)
    with torch.inference_mode():
        logits = oracle(torch.tensor([IDS])).logits[0]
        generated = oracle.generate(torch.tensor([IDS]), do_sample=False, max_new_tokens=64, eos_token_id=None)
    expected = generated[0, N_PROMPT:].tolist()
    theirs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, prompt_logprobs=0)
    for eager in (True, False):
        llm = LLM(str(tmp_path), device="cuda", enforce_eager=eager, **SIZE)
        (one,) = llm.generate([IDS], greedy, use_tqdm=False)
        ours = [row[token].logprob for token, row in zip(IDS[1:], (one.prompt_logprobs or [])[1:], strict=True) if row]
        assert (torch.tensor(ours) - theirs).abs().max() <= 1e-3
        assert one.outputs[0].token_ids == expected, "eager" if eager else "graphs"
        llm.shutdown()
