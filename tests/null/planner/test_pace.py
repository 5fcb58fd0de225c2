"""How many prompt tokens fit beside decodes: the closed form against counting, and its meaning for an 8B model."""

from __future__ import annotations

import dataclasses
import random

import pytest
from planner_shapes import LLAMA_8B

from quire.planner.calibration import Ceilings
from quire.planner.pace import pace_for

H200 = Ceilings(device="h200", read_bytes_per_s=4.3e12, flops_per_s={"bfloat16": 790e12})
PACE = pace_for(LLAMA_8B, H200, 2.0)


def test_the_answer_is_the_largest_number_within_the_factor() -> None:
    rng = random.Random(0)
    for _ in range(200):
        factor = rng.choice([1.1, 1.5, 2.0, 4.0])
        pace = dataclasses.replace(PACE, factor=factor, min_tokens=1)
        n_decodes, context = rng.randint(1, 512), rng.choice([0, 100, 16_000, 120_000])
        n_cached = n_decodes * rng.randint(1, 4000)
        behind_per_decode = rng.choice([0.0, 0.02, 0.7, 3.0])
        limit_s = pace.stretch(behind_per_decode) * pace.step_s(n_decodes, n_cached, 0, 0)
        n = pace.prompt_tokens(n_decodes, n_cached, context, behind_per_decode)
        assert pace.stretch(0.0) == factor and pace.stretch(99.0) == pace.stretch(1.0) == 1 + 9 * (factor - 1)
        assert n == 1 or pace.step_s(n_decodes, n_cached, n, context) <= limit_s * (1 + 1e-9)
        assert pace.step_s(n_decodes, n_cached, n + 1, context) > limit_s * (1 - 1e-9)


def test_an_8b_model_on_an_h200() -> None:
    """64 streams at 1k: some 250 tokens of a prompt a step, fewer at its 16,000th token; a long prompt goes on."""
    early, late = (PACE.prompt_tokens(64, 64 * 1024, context) for context in (0, 16_000))
    assert 150 < late < 0.8 * early < 250
    assert PACE.prompt_tokens(256, 256 * 1024, 0) > early
    assert PACE.prompt_tokens(1, 100, 10_000_000) == PACE.min_tokens


@pytest.mark.parametrize("itemsize", [1, 2])
def test_a_lone_decode_reads_the_weights(itemsize: int) -> None:
    pace = pace_for(LLAMA_8B, H200, 2.0, weight_itemsize=itemsize)
    assert pace.step_s(1, 0, 0, 0) == pytest.approx(1.75e-3 * itemsize, rel=0.02)
