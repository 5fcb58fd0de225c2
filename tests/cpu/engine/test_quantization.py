"""`quantization` in the engine: what it answers, that a batch changes nothing, its memory, and where it is refused."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator

import pytest

from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams
from quire.engine.build import build_engine
from quire.engine.capacity import equation, size_pool
from quire.engine.llm import LLM
from quire.planner.memory import Room

DEMO = pathlib.Path(__file__).resolve().parents[3] / "quire/_models/demo"


@pytest.fixture(scope="module", params=["int8", "int4", "int4-g128"])
def quantized(request: pytest.FixtureRequest) -> Iterator[LLM]:
    yield LLM(str(DEMO), quantization=request.param, max_num_seqs=16, num_gpu_blocks_override=257, device="cpu")


def test_answers(quantized: LLM) -> None:
    chat = [{"role": "user", "content": "How many minutes are in 3 hours?"}]
    output = quantized.chat(chat, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0]
    assert "180" in output.outputs[0].text


def test_greedy_tokens_alone_and_in_a_batch(quantized: LLM) -> None:
    """Prompts of many lengths, so that prefill and decode rows mix."""
    source = random.Random(4)
    prompts = [[source.randrange(5, 4000) for _ in range(length)] for length in (1, 2, 3, 17, 40, 64, 65, 130)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    together = quantized.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for ids, output in zip(prompts, together, strict=True):
        alone = quantized.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("device", ["cuda", "null"])
def test_other_devices_refuse(device: str) -> None:
    config = EngineConfig(model=str(DEMO), quantization="int8-g32", device=device)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"quantization = 'int8-g32' .* {device}: add --device cpu") as caught:
        resolve(config, read_arch(DEMO), device)
    assert caught.value.param == "quantization"


def test_the_null_engine_refuses() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        build_engine(EngineConfig(model=str(DEMO), quantization="int4", device="null"))


def test_the_pool_is_sized_beside_the_true_bytes_of_the_weights() -> None:
    arch, config = read_arch(DEMO), EngineConfig(num_gpu_blocks_override=500, max_num_seqs=4)
    limits = resolve(config, arch, "cpu")
    fixed_bytes = equation(config, limits, arch, weights_bytes=1).fixed_bytes
    total_bytes = fixed_bytes + 500 * equation(config, limits, arch).page_bytes + 5_000_000
    room = Room(total_bytes, total_bytes // 2)
    assert size_pool(config, limits, arch, room, weights_bytes=4_999_999)[0] == 500
    with pytest.raises(ConfigError, match="500 KV pages do not fit"):
        size_pool(config, limits, arch, room, weights_bytes=5_000_002)


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig(quantization="int3").verify()  # type: ignore[arg-type]


def test_a_float32_checkpoint(checkpoint: pathlib.Path) -> None:
    """Activations in float32; k and n that are no multiples of the packed tiles."""
    llm = LLM(str(checkpoint), quantization="int8", max_num_seqs=4, num_gpu_blocks_override=65, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 8
