"""The analytic cost of a step, against figures worked out by hand and the limits of known workloads."""

from __future__ import annotations

import dataclasses

import pytest
from planner_shapes import LLAMA_8B

from quire.core.errors import ConfigError
from quire.core.plan import Spans
from quire.planner.cost import CostModel
from quire.planner.hardware import HARDWARE, hardware_named
from quire.planner.shape import kv_numbers_per_token

COST = CostModel(shape=LLAMA_8B, hardware=dataclasses.replace(HARDWARE["h200"], step_overhead_s=0.0))


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


def test_unknown_hardware_is_named() -> None:
    with pytest.raises(ConfigError, match="'h300' is unknown: choose one of cpu, h200"):
        hardware_named("h300")
