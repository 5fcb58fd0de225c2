"""Keys and values in e4m3, which GPUs alone take, through the whole engine, on the CPU by the kernels' references: what
it answers, and that batches, prefixes, copies, drafts and preemption change nothing."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.compute import platform, worker
from quire.compute.draft import small
from quire.compute.runner.pool import KVPool
from quire.compute.weights.kv_scales import read_kv_scales
from quire.config import resolve
from quire.core.outputs import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM
from quire.kernels.kvstore.entry import Scales

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "device": "cpu", "kv_cache_dtype": "fp8"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(seed: int, lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    source = random.Random(seed)
    return [{"prompt_token_ids": [source.randrange(5, 300) for _ in range(length)]} for length in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def logprobs(engine: LLM) -> np.ndarray:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate(prompts(1, (100, 70)), params, use_tqdm=False)
    return np.array([next(iter(place.values())).logprob for one in outputs for place in one.prompt_logprobs[1:]])


def apart(exact: LLM, ours: LLM) -> float:
    """Of their log-probabilities, in standard deviations of the first."""
    wanted, got = logprobs(exact), logprobs(ours)
    return float(np.square(wanted - got).mean() ** 0.5 / wanted.std())


@pytest.fixture(scope="module", autouse=True)
def on_this_cpu() -> Iterator[None]:
    """No step in one native call: that one reads no e4m3."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resolve.KV_ROUNDED, "fp8", ("fp8", ("cpu",)))
        patch.setattr(platform.CpuPlatform, "kv_rounded", "fp8")
        patch.setattr(platform, "obstacle", lambda model: "keys of e4m3")
        yield


@pytest.fixture(scope="module")
def rounded(checkpoint: pathlib.Path, on_this_cpu: None) -> Iterator[LLM]:
    llm = LLM(str(checkpoint), num_gpu_blocks_override=129, **OPTIONS)
    yield llm
    llm.shutdown()


def test_logits_are_close_to_those_of_an_exact_cache(rounded: LLM, llm: LLM) -> None:
    """Three bits of fraction: farther than int8, nearer than another model."""
    assert 0.02 < apart(llm, rounded) < 0.3


SCALE = 2.0**-3


@pytest.fixture(scope="module")
def scaled(checkpoint: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The same weights, and scales of keys and values."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("scaled") / "model")
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantised = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(SCALE) for kind in "kv"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_scales_of_a_checkpoint_are_used(scaled: pathlib.Path, llm: LLM, rounded: LLM) -> None:
    """Keys and values under other scales are the same numbers, but for those that e4m3 has no exponent for."""
    ours = LLM(str(scaled), num_gpu_blocks_override=129, **OPTIONS)
    assert 0.02 < apart(llm, ours) < 0.3
    assert apart(rounded, ours) > 0
    ours.shutdown()


def test_a_draft_model_has_its_own_scales_and_sleep_keeps_all(
    scaled: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read with the weights: not at waking with weights that the host kept."""
    read: list[pathlib.Path] = []
    pools: list[KVPool] = []

    def reading(folder: pathlib.Path, *others: Any) -> dict[int, Scales]:
        read.append(folder)
        return read_kv_scales(folder, *others)

    def making(*given: Any) -> KVPool:
        pools.append(KVPool(*given))
        return pools[-1]

    monkeypatch.setattr(worker, "read_kv_scales", reading)
    monkeypatch.setattr(worker, "KVPool", making)
    monkeypatch.setattr(small, "KVPool", making)
    drafts = {"model": str(scaled), "num_speculative_tokens": 2}
    engine = LLM(str(scaled), num_gpu_blocks_override=129, speculative_config=drafts, enable_sleep_mode=True, **OPTIONS)
    expected = {layer: Scales(SCALE, SCALE) for layer in pools[0].group_of}
    assert [pool.scales for pool in pools] == [expected] * 2 and expected
    for level, n_read in ((1, 2), (2, 4)):
        engine.sleep(level)
        engine.wake_up()
        assert [pool.scales for pool in pools[-2:]] == [expected] * 2 and len(read) == n_read
    engine.shutdown()


def test_a_batch_and_cached_prefixes_change_nothing(rounded: LLM) -> None:
    """Many lengths, prompts in chunks of 48 tokens; alone the second time, with their pages from the tree."""
    given = prompts(2, (1, 2, 17, 40, 64, 65, 130))
    together = tokens(rounded.generate(given, GREEDY, use_tqdm=False))
    assert together == [tokens(rounded.generate([one], GREEDY, use_tqdm=False))[0] for one in given]
    assert rounded.stats().prefix_hits > 100


def test_preemption_and_copied_pages_change_nothing(checkpoint: pathlib.Path, rounded: LLM) -> None:
    """Several samples of a prompt share its last, partial page, which is copied when they write; in a pool for a few
    sequences they are preempted and computed again."""
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=40, ignore_eos=True)
    given = prompts(3, (21, 37, 50))
    tight = LLM(str(checkpoint), num_gpu_blocks_override=17, enable_prefix_caching=False, **OPTIONS)
    expected = tokens(rounded.generate(given, params, use_tqdm=False))
    assert tokens(tight.generate(given, params, use_tqdm=False)) == expected
    assert tight.stats().preemptions > 0
    tight.shutdown()


def test_drafts_change_nothing(checkpoint: pathlib.Path, rounded: LLM) -> None:
    """Rows of drafts are verified against the same pages, and trees move entries of tokens."""
    loop = [{"prompt_token_ids": [7, 8, 9, 10, 11] * 8}]
    for method in ({"method": "ngram", "num_speculative_tokens": 3}, {"method": "suffix", "branching": 2}):
        llm = LLM(str(checkpoint), num_gpu_blocks_override=129, speculative_config=method, **OPTIONS)
        expected = tokens(rounded.generate(loop, GREEDY, use_tqdm=False))
        assert tokens(llm.generate(loop, GREEDY, use_tqdm=False)) == expected
        llm.shutdown()
