"""`kv_cache_dtype` in the engine: what int8 answers, that batches, prefixes, copies and preemption change nothing, its
memory, and where it is refused."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.compute.device.cpu import CpuDevice
from quire.compute.runner.pool import KVPool
from quire.compute.worker import KV_DTYPES
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.core.outputs import RequestOutput
from quire.core.sampling import SamplingParams
from quire.engine.capacity import equation
from quire.engine.llm import LLM

DEMO = pathlib.Path(__file__).resolve().parents[3] / "quire/_models/demo"
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(seed: int, lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    source = random.Random(seed)
    return [{"prompt_token_ids": [source.randrange(5, 300) for _ in range(length)]} for length in lengths]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def rounded(checkpoint: pathlib.Path) -> Iterator[LLM]:
    llm = LLM(str(checkpoint), kv_cache_dtype="int8", num_gpu_blocks_override=129, **OPTIONS)
    yield llm
    llm.shutdown()


def test_logits_are_close_to_those_of_an_exact_cache(rounded: LLM, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    given = prompts(1, (100, 70))

    def logprobs(engine: LLM) -> np.ndarray:
        outputs = engine.generate(given, params, use_tqdm=False)
        found = [next(iter(place.values())).logprob for one in outputs for place in one.prompt_logprobs[1:]]
        return np.array(found)

    exact, ours = logprobs(llm), logprobs(rounded)
    error = float(np.square(exact - ours).mean() ** 0.5 / exact.std())
    assert 0 < error < 0.03


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
    tight = LLM(
        str(checkpoint), kv_cache_dtype="int8", num_gpu_blocks_override=17, enable_prefix_caching=False, **OPTIONS
    )
    assert tokens(tight.generate(given, params, use_tqdm=False)) == tokens(
        rounded.generate(given, params, use_tqdm=False)
    )
    assert tight.stats().preemptions > 0
    tight.shutdown()


def test_the_demo_model_answers() -> None:
    llm = LLM(str(DEMO), kv_cache_dtype="int8", max_num_seqs=4, num_gpu_blocks_override=257, device="cpu")
    chat = [{"role": "user", "content": "How many minutes are in 3 hours?"}]
    output = llm.chat(chat, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    assert "180" in output.outputs[0].text
    llm.shutdown()


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.2-1b"])
def test_a_page_takes_half_the_memory(shape: str) -> None:
    """The memory equation says what the pool really takes."""
    arch = read_arch(pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes" / shape)
    found = {}
    for kv_dtype, device in (("bf16", "cpu"), ("int8", "cpu"), ("int8", "cuda")):
        config = EngineConfig(kv_cache_dtype=kv_dtype)  # type: ignore[arg-type]
        limits = resolve(config, arch, device)
        terms = equation(config, limits, arch)
        pool = KVPool(arch, 3, config.block_size, KV_DTYPES[limits.kv_dtype], CpuDevice())
        assert pool.k.nbytes + pool.v.nbytes == 3 * terms.page_bytes
        assert pool.bytes_per_token * config.block_size == terms.page_bytes
        found[kv_dtype] = terms.page_bytes
    assert found["int8"] / found["bf16"] == 0.5 + 2 / arch.head_dim


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        ("int8", "null", "cpu and cuda only and the device is null, which takes auto .bfloat16.: .* add --device cpu"),
        ("fp8", "cpu", "cuda only and the device is cpu, which takes --kv-cache-dtype int8 or auto .bfloat16."),
        ("fp8_e4m3", "null", "'fp8_e4m3' works on cuda only .* add --device cuda"),
    ],
)
def test_other_devices_refuse(asked: Any, device: str, words: str) -> None:
    config = EngineConfig(model=str(DEMO), kv_cache_dtype=asked)
    with pytest.raises(ConfigError, match=words) as one:
        resolve(config, read_arch(DEMO), device)
    assert one.value.param == "kv_cache_dtype"


def test_a_page_of_e4m3_is_half_a_page(shape: str = "qwen3-0.6b") -> None:
    """So the pool holds twice the tokens, beside what prompts widen; both spellings mean it."""
    arch = read_arch(pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes" / shape)
    found = []
    for kv_dtype in ("bf16", "fp8", "fp8_e4m3"):
        config = EngineConfig(kv_cache_dtype=kv_dtype)  # type: ignore[arg-type]
        limits = resolve(config, arch, "cuda")
        terms = equation(config, limits, arch)
        pool = KVPool(arch, 3, config.block_size, KV_DTYPES[limits.kv_dtype], CpuDevice())
        assert pool.k.nbytes + pool.v.nbytes == 3 * terms.page_bytes
        found.append((limits.kv_dtype, terms))
    pool_bytes = found[0][1].total_bytes(1000) - found[0][1].total_bytes(0)
    pages = [(kv_dtype, terms.pages_within(terms.total_bytes(0) + pool_bytes)) for kv_dtype, terms in found]
    assert pages == [("bfloat16", 1000), ("fp8", 2000), ("fp8", 2000)]


def test_bf16_is_for_activations_of_bf16() -> None:
    arch = read_arch(DEMO)
    assert resolve(EngineConfig(kv_cache_dtype="bf16"), arch, "cuda").kv_dtype == "bfloat16"
    assert resolve(EngineConfig(dtype="float32"), arch, "cpu").kv_dtype == "float32"
    with pytest.raises(ConfigError, match="kv_cache_dtype = 'bfloat16' but dtype is float32"):
        resolve(EngineConfig(kv_cache_dtype="bfloat16", dtype="float32"), arch, "cpu")
