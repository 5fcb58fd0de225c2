"""The analytic cost of a step, against figures worked out by hand and the limits of known workloads."""

from __future__ import annotations

import dataclasses

import pytest
from planner_shapes import LLAMA_8B, SHAPES

from quire.config.model import read_arch
from quire.core.errors import ConfigError
from quire.core.plan import Spans
from quire.planner.cost import CostModel
from quire.planner.hardware import HARDWARE, hardware_named
from quire.planner.shape import head_weights, kv_numbers_per_token, layer_weights, read_weights, state_bytes

COST = CostModel(arch=LLAMA_8B, hardware=dataclasses.replace(HARDWARE["h200"], step_overhead_s=0.0))


def spans(*rows: tuple[int, int]) -> Spans:
    made = Spans([], [], [], [], [])
    for slot, (start, length) in enumerate(rows):
        made.add(slot, start, length, True)
    return made


def test_one_token_reads_the_weights_once() -> None:
    """3.5 ms a token at batch 1 is the memory limit of an 8B model in bf16 at 4.3 TB/s."""
    assert COST.step_s(spans((128, 1))) == pytest.approx(3.5e-3, rel=0.02)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    """8,192 tokens: 174 ms; 1,024 tokens: 18.6 ms, at 790 TFLOP/s."""
    assert COST.step_s(spans((0, 1024))) == pytest.approx(18.6e-3, rel=0.05)
    assert COST.step_s(spans((0, 8192))) == pytest.approx(174e-3, rel=0.05)


def test_a_batch_reads_its_context() -> None:
    """256 sequences at about 1,088 tokens: 12.9 ms."""
    assert COST.step_s(spans(*[(1088, 1)] * 256)) == pytest.approx(12.0e-3, rel=0.08)


def test_chunks_add_up() -> None:
    """Two chunks of a prompt do the same arithmetic as one, and read the first chunk's K/V again."""
    whole, first, second = COST.work(spans((0, 100))), COST.work(spans((0, 60))), COST.work(spans((60, 40)))
    head = 2 * LLAMA_8B.hidden_size * LLAMA_8B.vocab_size
    assert first.n_flops + second.n_flops == pytest.approx(whole.n_flops + head)
    weights = COST.work(spans((0, 1))).n_bytes - 2 * 2 * kv_numbers_per_token(LLAMA_8B)
    again = 60 * 2 * kv_numbers_per_token(LLAMA_8B)
    assert first.n_bytes + second.n_bytes == pytest.approx(whole.n_bytes + weights + again)


def test_a_window_hides_old_keys() -> None:
    """Against a count of every row and key, half of the layers with a window."""
    half = dataclasses.replace(COST, windows=(0, 7) * (LLAMA_8B.n_layers // 2))
    for rows in [((3, 1),), ((40, 1),), ((0, 20),), ((5, 20),), ((2, 3), (30, 9))]:
        pairs, reads = 0, 0
        for start, n in rows:
            seen = [range(max(0, start + i - 6), start + i + 1) for i in range(n)]
            pairs += sum(map(len, seen))
            reads += len({key for keys in seen for key in keys})
        whole, halved = COST.work(spans(*rows)), half.work(spans(*rows))
        all_pairs = sum(start + i + 1 for start, n in rows for i in range(n))
        hidden = (all_pairs - pairs) / 2 * 4 * LLAMA_8B.n_layers * LLAMA_8B.n_heads * LLAMA_8B.head_dim
        unread = (sum(start + n for start, n in rows) - reads) / 2 * 2 * kv_numbers_per_token(LLAMA_8B)
        assert whole.n_flops - halved.n_flops == pytest.approx(hidden)
        assert whole.n_bytes - halved.n_bytes == pytest.approx(unread)


def test_prompts_of_latent_attention_count_the_way_that_takes_fewer() -> None:
    """V2-Lite: a pair takes 2,176 operations a head against lines, 640 where keys and values are made of them."""
    lite = dataclasses.replace(COST, arch=read_arch(SHAPES / "deepseek-v2-lite"))
    head, body = 2 * 2048 * 102400, 2 * lite.arch.n_layers * read_weights(lite.arch, 1)

    def of_pairs(start: int, n: int) -> float:
        return (lite.work(spans((start, n))).n_flops - head - body * n) / (27 * 16)

    assert of_pairs(8192, 1) == pytest.approx(8193 * 2176)
    assert of_pairs(0, 1024) == pytest.approx(1024 * 1025 / 2 * 640, rel=1e-3)
    behind = 1024 * 8192 + 1024 * 1025 / 2
    assert of_pairs(8192, 1024) == pytest.approx(behind * 640 + 8192 * 2 * 512 * 256, rel=1e-3)
    assert of_pairs(8192, 64) == pytest.approx((64 * 8192 + 64 * 65 / 2) * 2176, rel=1e-3), "making them takes more"


def test_a_sequence_that_begins_has_no_state_to_read() -> None:
    mamba = dataclasses.replace(COST, arch=read_arch(SHAPES / "mamba2-2.7b"))
    fresh, later = (mamba.work(spans((start, 1))).n_bytes for start in (0, 7))
    assert later - fresh == state_bytes(mamba.arch) > 1e8


def test_a_shared_prefix_is_read_once() -> None:
    decodes, page_size = spans(*[(2100, 1)] * 5), 16
    cost = dataclasses.replace(COST, page_size=page_size)
    alone, together = cost.work(decodes), cost.work(decodes, [([0, 1, 3], 128), ([2, 4], 10)])
    saved = (2 * 128 + 10) * page_size * 2 * kv_numbers_per_token(LLAMA_8B)
    assert alone.n_bytes - together.n_bytes == pytest.approx(saved) and alone.n_flops == together.n_flops


def test_quantised_weights_are_smaller() -> None:
    small = dataclasses.replace(COST, weight_itemsize=0.5625, head_itemsize=1.0)
    saved = COST.work(spans((0, 1))).n_bytes - small.work(spans((0, 1))).n_bytes
    body = LLAMA_8B.n_layers * layer_weights(LLAMA_8B)
    assert saved == pytest.approx(1.4375 * body + head_weights(LLAMA_8B))


def test_unknown_hardware_is_named() -> None:
    with pytest.raises(ConfigError, match="'h300' is unknown: choose one of cpu, h200"):
        hardware_named("h300")
