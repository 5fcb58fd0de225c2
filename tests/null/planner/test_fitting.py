"""The search finds the numbers that steps were made with."""

from __future__ import annotations

import msgspec
import pytest
from planner_shapes import LLAMA_8B, QWEN_600M

from quire.planner.accelerators import accelerator_named, calibration_for
from quire.planner.calibration import Calibration
from quire.planner.fitting import Sample, curve_knobs, fit, sample_loss, turned
from quire.planner.formats import Formats
from quire.planner.operators import decode_spans, prefill_spans

TRUTH = calibration_for(accelerator_named("h200"))


def samples(truth: Calibration) -> list[Sample]:
    cases = [(arch, decode_spans(n, context)) for arch in (LLAMA_8B, QWEN_600M) for n, context in ((1, 64), (64, 2000))]
    cases += [(LLAMA_8B, prefill_spans(2048))]
    made = [
        Sample(
            name="",
            arch=arch,
            formats=Formats(),
            spans=spans,
            seconds=1.0,
            waits=len(spans) == 1 and spans.starts[0] == 0,
        )
        for arch, spans in cases
    ]
    return [msgspec.structs.replace(one, seconds=one.expected_s(truth)) for one in made]


def test_what_was_turned_is_found_again() -> None:
    knobs = [("products.bfloat16", "bytes_share", 0), ("attention", "bytes_share", 0), ("step_s", "", 0)]
    start = TRUTH
    for knob, times in zip(knobs, (0.6, 1.5, 3.0), strict=True):
        start = turned(start, knob, times)
    found = fit(start, samples(TRUTH), knobs)
    assert sample_loss(samples(TRUTH), found) < 1e-4 < 0.1 < sample_loss(samples(TRUTH), start)
    assert found.products["bfloat16"].bytes_share == pytest.approx(TRUTH.products["bfloat16"].bytes_share, rel=0.02)
    assert found.attention.bytes_share == pytest.approx(TRUTH.attention.bytes_share, rel=0.02)


def test_knobs_are_all_numbers_of_a_curve() -> None:
    found = curve_knobs(TRUTH, "products.bfloat16", ("fixed_s", "bytes_share"))
    assert len(found) == len(TRUTH.products["bfloat16"].rows) + 1
    changed = turned(TRUTH, found[0], 2.0)
    assert changed.products["bfloat16"].fixed_s[0] == 2 * TRUTH.products["bfloat16"].fixed_s[0]
    assert changed.products["bfloat16"].fixed_s[1:] == TRUTH.products["bfloat16"].fixed_s[1:]
    assert changed.attention == TRUTH.attention
