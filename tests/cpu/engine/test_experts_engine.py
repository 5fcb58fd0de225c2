"""A model with experts in the engine: batches, chunks, prefix hits and preemption change none of its tokens."""

from __future__ import annotations

import pathlib
import random
import statistics

import pytest
import torch
from family_cases import QWEN2_MOE, checkpoint_of, random_checkpoint

from quire.compute.layers.experts import Experts
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.core.sampling import SamplingParams
from quire.engine.expert_load import imbalance, since
from quire.engine.llm import LLM
from quire.planner.counted_experts import CountedExperts, counted_operator
from quire.planner.formats import Formats
from quire.planner.parts import rank_parts

SIZE = {"device": "cpu", "dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}


def test_why_steps_are_many_calls_is_said(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint_of("qwen2_moe", tmp_path)
    LLM(str(tmp_path), **SIZE, num_gpu_blocks_override=20, skip_tokenizer_init=True).shutdown()
    assert "knows no gated shared expert" in caplog.text and "its answers are the same" in caplog.text


def test_tokens_are_those_of_transformers_whatever_else_runs(tmp_path: pathlib.Path) -> None:
    oracle = checkpoint_of("qwen2_moe", tmp_path)
    source = random.Random(5)
    first = [source.randrange(1, 256) for _ in range(40)]
    batch = [first + [source.randrange(1, 256) for _ in range(source.randrange(1, 30))] for _ in range(9)]
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=32, ignore_eos=True)
    found = []
    for n_pages in (200, 20):
        llm = LLM(
            str(tmp_path),
            **SIZE,
            block_size=8,
            num_gpu_blocks_override=n_pages,
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
        )
        before = llm.expert_loads()
        texts = [one.outputs[0].token_ids for one in llm.generate(batch, greedy, use_tqdm=False)]
        texts += [one.outputs[0].token_ids for one in llm.generate(batch, seeded, use_tqdm=False)]
        assert (llm.stats().preemptions > 0) == (n_pages == 20)
        assert llm.stats().prefix_hits > 0
        loads = llm.expert_loads()
        first, last = (sum(now) - sum(then) for now, then in zip(loads, before, strict=True))
        assert first == 3 * llm.stats().computed_tokens > last, "the last layer has the rows that are wanted"
        assert 1 <= llm.stats().expert_imbalance <= 8 and 1 <= imbalance(loads) <= 8
        assert llm.stats().expert_layers == [0, 2], "the layer between them is dense"
        found.append(texts)
        loads = llm.expert_loads()
        for level in (1, 2) if n_pages == 200 else ():
            llm.sleep(level)
            assert llm.expert_loads() == loads
            llm.wake_up()
            assert llm.expert_loads() == loads and llm.stats().expert_imbalance >= 1
            llm.generate(batch[:1], greedy, use_tqdm=False)
            more = llm.expert_loads()
            assert all(sum(now) > sum(then) for now, then in zip(more, loads, strict=True))
            loads = more
        llm.shutdown()
    assert found[0] == found[1]
    for prompt, tokens in zip(batch[:4], found[0], strict=False):
        ids = torch.tensor([prompt])
        expected = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False,
                                   eos_token_id=None)  # fmt: skip
        assert tokens == expected[0, len(prompt) :].tolist()


def test_counts_say_how_many_experts_a_step_reads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An even choice would read a fifth more than this router chooses."""
    random_checkpoint(tmp_path, "Qwen2Moe", **QWEN2_MOE | {"num_experts": 64, "mlp_only_layers": []})
    real, chosen = Experts._routed, []

    def routed(self: Experts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = real(self, x)
        chosen.append((len(ids), len(set(ids.flatten().tolist()))))
        return ids, weights

    monkeypatch.setattr(Experts, "_routed", routed)
    n = 16
    size = SIZE | {"max_num_seqs": n, "num_gpu_blocks_override": 120}
    llm = LLM(str(tmp_path), **size, skip_tokenizer_init=True)
    before = llm.expert_loads()
    chosen.clear()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    llm.generate([[7 * i + 1, 5] for i in range(n)], params, use_tqdm=False)
    loads = since(before, llm.expert_loads())
    llm.shutdown()
    really = statistics.fmean(n_experts for n_rows, n_experts in chosen if n_rows == n)
    product = next(one for one in rank_parts(read_arch(tmp_path), Mesh(), Formats()).products if one.is_experts)
    counted = counted_operator(CountedExperts.of(loads), product, n, Formats()).weight_bytes / product.n_bytes
    assert counted == pytest.approx(really, rel=0.05)
    assert product.read_bytes(n) / product.n_bytes > 1.15 * really
