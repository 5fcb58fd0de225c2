"""Parameters, active parameters, KV bytes and FLOPs of every bundled shape, against what its authors publish.

Totals: the `total` of the safetensors index, or the parameter count, on each model's card on the hub (without what the
card counts twice: a tied head; and without multi-token-prediction modules). tests/cpu/bench compares the same with
transformers. Active ones: the models' reports, rounded as there. KV: DeepSeek-V3's report (arXiv 2412.19437): 70 KB.
"""

from __future__ import annotations

import pytest

from quire.bench.shape import FOLDER, shape_names
from quire.config.model import read_arch
from quire.planner.operators import decode_spans, prefill_spans, step_operators, totals
from quire.planner.parts import active_parameters, parameters_by_part
from quire.planner.shape import kv_numbers_per_token, pair_flops

PUBLISHED = {
    "command-r": (34_980_831_232, 2 * 40 * 64 * 128),
    "deepseek-v2": (235_741_434_880, 60 * (512 + 64)),
    "deepseek-v2-lite": (15_706_484_224, 27 * (512 + 64)),
    "deepseek-v3": (671_026_419_200, 61 * (512 + 64)),
    "gemma-2-9b": (9_241_705_984, 2 * 42 * 8 * 256),
    "gemma-3-1b": (999_885_952, 2 * 26 * 1 * 256),
    "gpt-oss-120b": (116_829_156_672, 2 * 36 * 8 * 64),
    "gpt-oss-20b": (20_914_757_184, 2 * 24 * 8 * 64),
    "lfm2-1.2b": (1_170_340_608, 2 * 6 * 8 * 64),
    "llama-2-13b": (13_015_864_320, 2 * 40 * 40 * 128),
    "llama-2-70b": (68_976_648_192, 2 * 80 * 8 * 128),
    "llama-2-7b": (6_738_415_616, 2 * 32 * 32 * 128),
    "llama-3.1-405b": (405_853_388_800, 2 * 126 * 8 * 128),
    "llama-3.1-70b": (70_553_706_496, 2 * 80 * 8 * 128),
    "llama-3.1-8b": (8_030_261_248, 2 * 32 * 8 * 128),
    "llama-3.2-1b": (1_235_814_400, 2 * 16 * 8 * 64),
    "mamba2-2.7b": (2_702_599_680, 0),
    "mistral-7b-v0.3": (7_248_023_552, 2 * 32 * 8 * 128),
    "mixtral-8x22b": (140_620_634_112, 2 * 56 * 8 * 128),
    "mixtral-8x7b": (46_702_792_704, 2 * 32 * 8 * 128),
    "olmoe-1b-7b": (6_919_161_856, 2 * 16 * 16 * 128),
    "phi-4": (14_659_507_200, 2 * 40 * 10 * 128),
    "qwen2.5-72b": (72_706_203_648, 2 * 80 * 8 * 128),
    "qwen2.5-7b": (7_615_616_512, 2 * 28 * 4 * 128),
    "qwen3-0.6b": (596_049_920, 2 * 28 * 8 * 128),
    "qwen3-235b-a22b": (235_093_634_560, 2 * 94 * 4 * 128),
    "qwen3-30b-a3b": (30_532_122_624, 2 * 48 * 4 * 128),
    "qwen3-32b": (32_762_123_264, 2 * 64 * 8 * 128),
    "qwen3-8b": (8_190_735_360, 2 * 36 * 8 * 128),
    "qwen3-next-80b-a3b": (79_674_391_296, 2 * 12 * 2 * 256),
    "smollm2-1.7b": (1_711_376_384, 2 * 24 * 32 * 64),
    "starcoder2-7b": (7_173_923_840, 2 * 32 * 4 * 128),
}
"""Shape → parameters, numbers that a token leaves in the cache."""
ACTIVE = {
    "mixtral-8x7b": 12.9, "mixtral-8x22b": 39.0, "deepseek-v2": 21.0, "deepseek-v3": 37.0, "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0, "olmoe-1b-7b": 1.3,
}  # fmt: skip
"""Billions, in the reports; within half of their last digit, or a digit that they cut."""
WITHOUT_EMBEDDING = {"gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1}
"""gpt-oss's card counts the head and not the embedding (arXiv 2508.10925, table 1)."""


def test_every_shape_is_here_and_there_are_enough() -> None:
    assert shape_names() == sorted(PUBLISHED) and len(PUBLISHED) >= 25


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_and_keys_are_exact(name: str) -> None:
    arch, (total, numbers) = read_arch(FOLDER / name), PUBLISHED[name]
    assert arch.n_parameters == total
    assert sum(parameters_by_part(arch).values()) == total
    assert kv_numbers_per_token(arch) == numbers


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_parameters(name: str) -> None:
    found = active_parameters(read_arch(FOLDER / name)) / 1e9
    assert found == pytest.approx(ACTIVE[name], rel=0.02), "published, rounded"


@pytest.mark.parametrize("name", sorted(WITHOUT_EMBEDDING))
def test_active_parameters_without_the_embedding(name: str) -> None:
    arch = read_arch(FOLDER / name)
    found = (active_parameters(arch) - arch.vocab_size * arch.hidden_size) / 1e9
    assert found == pytest.approx(WITHOUT_EMBEDDING[name], rel=0.02)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-70b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3", "phi-4"])
def test_a_token_takes_two_operations_for_each_weight_that_it_meets(name: str) -> None:
    """2 N, N without embedding, norms and biases (Kaplan et al. 2020, section 2.1), and what attention adds."""
    arch = read_arch(FOLDER / name)
    parts = parameters_by_part(arch)
    n = active_parameters(arch) - parts["embedding"] - parts["norms"] - parts.get("other", 0)
    context = 777
    operators = [one for one in step_operators(arch, decode_spans(1, context)) if one.kind.value != "rows"]
    assert totals(operators)[1] == pytest.approx(2 * n + context * pair_flops(arch), rel=1e-9)


def test_a_prompt_attends_to_half_of_itself() -> None:
    """Llama-2-7B: 4 n h for a row and a key, n (n + 1) / 2 pairs a layer."""
    arch, n = read_arch(FOLDER / "llama-2-7b"), 100
    found = next(one for one in step_operators(arch, prefill_spans(n)) if one.name == "attention")
    assert found.n_times == 32 and found.n_flops == 4 * 32 * 128 * n * (n + 1) / 2
    assert found.cache_bytes == 2 * n * 2 * 32 * 128


def test_experts_are_read_as_they_are_chosen() -> None:
    """Mixtral: a token reads 2 of 8, many tokens all."""
    arch = read_arch(FOLDER / "mixtral-8x7b")

    def read(n_rows: int) -> float:
        found = step_operators(arch, decode_spans(n_rows, 1))
        return next(one.weight_bytes for one in found if one.name == "experts gate_up")

    assert read(1) == pytest.approx(2 * 2 * 2 * 14336 * 4096)
    assert read(2) == pytest.approx(2 * (8 - 8 * (6 / 8) ** 2) * 2 * 14336 * 4096)
    assert read(1000) == pytest.approx(2 * 8 * 2 * 14336 * 4096)
