"""Two cores of a Xeon: fitted to the 0.6B shape, it expects the 1B shape (benchmarks/results/cpu_peers_xeon.json).

The recorded run was pinned to two quiet cores. Fitted: decoding 1, 8 and 16 sequences and a prompt of 512 tokens, in
bfloat16 and 8 bits. Means over the peers beside which a figure was measured.
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics

import pytest

from quire.bench.shape import FOLDER
from quire.config.model import read_arch
from quire.planner.calibration import Calibration, Curve
from quire.planner.fitting import Knob, Sample, fit
from quire.planner.formats import formats_named
from quire.planner.operators import decode_spans, prefill_spans

RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "cpu_peers_xeon.json"
CONTEXT = 144
"""Tokens in the middle of the recorded sequences, about."""
CURVE = Curve(rows=(1, 8, 16, 512), fixed_s=(3e-6,) * 4, bytes_share=0.9, flops_share=(0.5,) * 4)
START = Calibration(
    device="cpu", source="", read_bytes_per_s=36e9, flops_per_s={"bfloat16": 2e12, "int8": 4e12},
    products={"bfloat16": CURVE, "int8": CURVE}, experts=CURVE, attention=Curve(flops_share=(0.3,), bytes_share=0.7),
    step_s=2e-4,
)  # fmt: skip
KNOBS: list[Knob] = [
    ("attention", "flops_share", 0), ("products.bfloat16", "bytes_share", 0), ("products.int8", "bytes_share", 0),
    *((f"products.{kind}", "flops_share", i) for kind in ("bfloat16", "int8") for i in (1, 2, 3)),
]  # fmt: skip


def sample(shape: str, form: str, measure: str) -> Sample:
    rows = json.loads(RESULTS.read_text())["results"]["rows"]
    key = (shape, form, measure)
    rate = statistics.mean(
        one["medians"][1]
        for one in rows
        if (one["model"], one["format"], one["measure"]) == key and "Q4" not in one["peer"]
    )
    n = 1 if measure == "decode" else int(measure.split()[-1 if measure.startswith("prefill") else 0])
    spans = prefill_spans(n) if measure.startswith("prefill") else decode_spans(n, CONTEXT)
    formats = formats_named("int8" if form == "8-bit" else "auto")
    return Sample(name=f"{shape} {form} {measure}", arch=read_arch(FOLDER / shape), formats=formats, spans=spans,
                  seconds=n / rate)  # fmt: skip


@functools.cache
def fitted() -> Calibration:
    measures = ("decode", "8 sequences", "16 sequences", "prefill 512")
    return fit(START, [sample("qwen3-0.6b", form, one) for form in ("bf16", "8-bit") for one in measures], KNOBS)


@pytest.mark.parametrize("form", ["bf16", "8-bit"])
def test_decoding_of_another_shape_is_within_twelve_per_cent(form: str) -> None:
    one = sample("llama-3.2-1b", form, "decode")
    assert one.expected_s(fitted()) == pytest.approx(one.seconds, rel=0.12)


@pytest.mark.parametrize("form", ["bf16", "8-bit"])
def test_a_prompt_of_another_shape(form: str) -> None:
    """Wider: how much of it is attention cannot be told from one shape and one length."""
    one = sample("llama-3.2-1b", form, "prefill 512")
    assert one.expected_s(fitted()) == pytest.approx(one.seconds, rel=0.20)
