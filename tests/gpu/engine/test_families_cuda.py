"""Every family on a GPU in float32: 64 greedy tokens and prompt logprobs of transformers, eager and with graphs."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from family_cases import CASES, IDS, checkpoint_of

from quire.compute.runner import expanded_spans
from quire.config.latent import LatentAttentionSpec
from quire.control import snapshots
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


@pytest.mark.parametrize("case", ["lfm2", "mamba2", "qwen3_next", "bamba"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_states_go_on_from_snapshots(case: str, eager: bool, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """Cold and warm, samples of one prompt, and few pages: the same text."""
    monkeypatch.setattr(snapshots, "EVERY_TOKENS", 16)
    checkpoint_of(case, tmp_path)
    prompts = [IDS, IDS[:21], [*IDS[:30], 7, 8, 9], IDS, [5], IDS[:17]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts, options = [], {**SIZE, "max_num_batched_tokens": 24, "enforce_eager": eager}
    for more in ({}, {"enable_prefix_caching": False}, {"num_gpu_blocks_override": 8, "max_model_len": 64}):
        llm = LLM(str(tmp_path), device="cuda", **{**options, **more})
        for _ in range(2):
            found = llm.generate(prompts, greedy, use_tqdm=False)
            texts.append([one.outputs[0].token_ids for one in found])
        if not more:
            assert [one.num_cached_tokens for one in found] == [32, 16, 32, 32, 0, 16]
        if "max_model_len" in more:
            assert llm.stats().preemptions > 0
        llm.shutdown()
    assert all(one == texts[0] for one in texts)


@pytest.mark.parametrize("case", ["deepseek_v3-dense", "deepseek_v2"])
def test_cached_lines_are_expanded_for_chunks(case: str, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A prompt in three chunks: keys and values are made of all lines, some heads at a time."""
    monkeypatch.setattr(expanded_spans, "LEAST_ROWS", 1)
    monkeypatch.setattr(expanded_spans, "LEAST_CHUNK", 5)
    monkeypatch.setattr(LatentAttentionSpec, "spared_flops", lambda *_: 1)
    oracle = checkpoint_of(case, tmp_path)
    prompt = [(7 * i + 3) % 250 + 1 for i in range(110)]
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt])).logits[0]
    theirs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    llm = LLM(str(tmp_path), device="cuda", enforce_eager=True, **SIZE | {"max_num_batched_tokens": 48})
    (one,) = llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()
    ours = [row[token].logprob for token, row in zip(prompt[1:], (one.prompt_logprobs or [])[1:], strict=True) if row]
    assert (torch.tensor(ours) - theirs).abs().max() <= 1e-3
    assert one.outputs[0].token_ids[0] == int(logits[-1].argmax())


def test_a_float32_stream_is_captured(tmp_path: pathlib.Path) -> None:
    """Mamba-2 in bfloat16, whose stream is not: graphs give what steps kernel by kernel do."""
    checkpoint_of("mamba2", tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    texts = []
    for eager in (True, False):
        llm = LLM(str(tmp_path), device="cuda", dtype="bfloat16", enforce_eager=eager, **SIZE)
        texts.append([one.outputs[0].token_ids for one in llm.generate([IDS, IDS[:9]], greedy, use_tqdm=False)])
        llm.shutdown()
    assert texts[0] == texts[1]
