"""Latent attention in the engine: chunks, prefix hits, copies of pages, preemption and sleep change no token."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import checkpoint_of

from quire.compute.layers.latent import LatentAttention
from quire.compute.runner import expanded_spans
from quire.config.latent import LatentAttentionSpec
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

SIZE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128,
    "block_size": 8, "skip_tokenizer_init": True, "num_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    folder = tmp_path_factory.mktemp("latent")
    return folder, checkpoint_of("deepseek_v3-dense", folder)


def test_tokens_are_those_of_transformers_whatever_else_runs(checkpoint: tuple[pathlib.Path, Any]) -> None:
    folder, oracle = checkpoint
    source = random.Random(5)
    first = [source.randrange(1, 256) for _ in range(40)]
    batch = [first + [source.randrange(1, 256) for _ in range(source.randrange(1, 30))] for _ in range(7)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for n_pages in (200, 20):
        llm = LLM(str(folder), **SIZE, num_gpu_blocks_override=n_pages, enable_sleep_mode=True)
        found.append([one.outputs[0].token_ids for one in llm.generate(batch, greedy, use_tqdm=False)])
        assert (llm.stats().preemptions > 0) == (n_pages == 20)
        assert llm.stats().prefix_hits > 0
        if n_pages == 200:
            llm.sleep(1)
            llm.wake_up()
            found.append([one.outputs[0].token_ids for one in llm.generate(batch, greedy, use_tqdm=False)])
        llm.shutdown()
    assert found[0] == found[1] == found[2]
    for prompt, tokens in zip(batch[:3], found[0], strict=False):
        ids = torch.tensor([prompt])
        expected = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                                   eos_token_id=None)  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", ["deepseek_v3-dense", "deepseek_v2"])
def test_expanded_spans_are_computed_alike(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Keys and values made of lines, of cached prefixes too, beside spans whose queries read lines; one row too few."""
    oracle = checkpoint_of(case, tmp_path)
    found, made, kinds = [], [], set()
    real = LatentAttention._keys_and_values
    monkeypatch.setattr(
        LatentAttention, "_keys_and_values",
        lambda self, heads, size, context, apart: (
            made.append((heads.stop - heads.start, apart.n_rows, apart.n_lines))
            or kinds.add(type(apart.rows))
            or real(self, heads, size, context, apart)
        ),
    )  # fmt: skip
    monkeypatch.setattr(expanded_spans, "LEAST_CHUNK", 5)
    monkeypatch.setattr(LatentAttentionSpec, "spared_flops", lambda *_: 1)  # these heads are too small for any
    lengths = [*range(20, 25), 110]  # the last in three chunks of 48 rows at most
    prompts = [[(7 * i + 11 * n) % 250 + 1 for i in range(length)] for n, length in enumerate(lengths)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    beside = expanded_spans._places
    for least, places in ((1, beside), (1, lambda part, device: device.upload(np.flatnonzero(part))), (10_000, beside)):
        monkeypatch.setattr(expanded_spans, "LEAST_ROWS", least)
        monkeypatch.setattr(expanded_spans, "_places", places)
        llm = LLM(str(tmp_path), **SIZE | {"max_num_seqs": 3}, num_gpu_blocks_override=60)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([one.outputs[0].token_ids for one in outputs])
        llm.shutdown()
        assert (len(made) > 0) == (least == 1)
        if made:
            assert any(n_lines > n_rows for _, n_rows, n_lines in made), "a prefix was expanded"
            n_heads = oracle.config.num_attention_heads
            assert all(n_lines * heads <= n_heads * SIZE["max_num_batched_tokens"] for heads, _, n_lines in made)
            assert {heads for heads, _, _ in made} > {n_heads}, "all heads at once, and fewer"
        made.clear()
        ids = torch.tensor(prompts[-1:])
        theirs = oracle(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        ours = [row[token].logprob for row, token in zip(outputs[-1].prompt_logprobs[1:], prompts[-1][1:], strict=True)]
        assert (torch.tensor(ours) - theirs).abs().max() <= 1e-4
    assert found[0] == found[1] == found[2] and kinds == {slice, torch.Tensor}, "rows side by side, or anywhere"
    for at in (0, -1):
        ids = torch.tensor([prompts[at]])
        expected = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                   eos_token_id=None)  # fmt: skip
        assert found[0][at] == expected[0, ids.shape[1] :].tolist()


@torch.inference_mode()
def test_branches_of_one_prompt_have_their_own_lines(checkpoint: tuple[pathlib.Path, Any]) -> None:
    """They share a page that is not full, which is copied: a branch's logprobs are those of its own tokens."""
    folder, oracle = checkpoint
    prompt = list(range(3, 22))
    llm = LLM(str(folder), **SIZE, num_gpu_blocks_override=60)
    params = SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=12, ignore_eos=True, logprobs=0)
    (one,) = llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()
    assert len({tuple(branch.token_ids) for branch in one.outputs}) == 3
    for branch in one.outputs:
        ids = torch.tensor(prompt + branch.token_ids)
        theirs = oracle(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])
        ours = torch.tensor([row[token].logprob for row, token in zip(branch.logprobs, branch.token_ids, strict=True)])
        assert (ours - theirs[:, 0]).abs().max() <= 1e-3


def test_a_rounded_cache_is_refused_by_name(checkpoint: tuple[pathlib.Path, Any]) -> None:
    with pytest.raises(ConfigError, match="keeps a line a token") as caught:
        LLM(str(checkpoint[0]), **SIZE, kv_cache_dtype="int8")
    assert caught.value.param == "kv_cache_dtype"
