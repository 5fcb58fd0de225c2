"""Families in the engine, each in one run that has chunks, prefix hits and preemption: the 64 greedy tokens of every
prompt, their logprobs and those of a prompt are transformers'."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from family_cases import IDS, checkpoint_of

from quire.control import snapshots
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

N_TOKENS = 64
CHUNK, PAGE = 24, 8
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK, "block_size": PAGE, "max_model_len": 128,
}  # fmt: skip
PROMPTS = [IDS, IDS[:21], [*IDS[:30], 7, 8, 9], [5, 6], IDS, [*IDS, 11, 12, 13]]
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True, logprobs=0)
OF_PROMPT = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)


FAMILIES = (
    "deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe", "glm4_moe",
    "minimax_m2", "gpt_oss", "granitemoehybrid", "bamba", "lfm2", "mamba2", "qwen3_next",
)  # fmt: skip
"""Those with experts, latent attention or states."""
DENSE = ("gemma2", "gemma3", "exaone4", "gpt2", "falcon-alibi", "phi3-long")
"""Soft caps, windows, layers without positions, learned positions, slopes, long contexts."""


def check(theirs: torch.Tensor, tokens: list[int], logprobs: list[Any]) -> None:
    """theirs: [n, vocabulary], the oracle's logprobs before each token."""
    ours = torch.tensor([row[token].logprob for row, token in zip(logprobs, tokens, strict=True)])
    assert (ours - theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0]).abs().max() <= 1e-4


@pytest.mark.parametrize("case", [*FAMILIES, *DENSE])
def test_tokens_are_those_of_transformers(case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_TOKENS", 16)
    oracle = checkpoint_of(case, tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS, num_gpu_blocks_override=36)
    params = [*[GREEDY] * len(PROMPTS), OF_PROMPT]
    *outputs, last = llm.generate([*PROMPTS, IDS], params, use_tqdm=False)
    stats = llm.stats()
    llm.shutdown()
    assert stats.preemptions > 0
    assert outputs[4].num_cached_tokens >= 16, "the same prompt came before"
    for prompt, one in zip(PROMPTS, outputs, strict=True):
        tokens, logprobs = one.outputs[0].token_ids, one.outputs[0].logprobs
        with torch.inference_mode():
            theirs = oracle(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        # Each is the best behind those before it, which is what generating greedily means.
        assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
        check(theirs[len(prompt) - 1 : -1], tokens, logprobs)
    check(theirs[: len(IDS) - 1], IDS[1:], last.prompt_logprobs[1:])  # the last prompt begins with it
