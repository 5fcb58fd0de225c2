"""Launches that a layer has beside those of a plain one, and what they take."""

from __future__ import annotations

import pytest
from planner_shapes import SHAPES

from quire.config.model import read_arch
from quire.config.parameters import layer_parameters
from quire.planner.accelerators import accelerator_named
from quire.planner.cost import calibrated
from quire.planner.launches import Launches, launches_apart
from quire.planner.operators import decode_spans
from quire.planner.timing import PLAIN_LAUNCHES, ROW_KERNELS

GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "logits_scaling": 8.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "of_layer"),
    [
        ("llama-3.1-8b", (0, 0)), ("qwen3-0.6b", (0, 0)), ("qwen3-30b-a3b", (0, 0)), ("gpt-oss-20b", (0, 0)),
        ("gemma-3-1b", (5, 2)), ("gemma-2-9b", (5, 2)),  # two norms behind, their additions, and the activation
        ("starcoder2-7b", (1, 0)),  # the activation
        ("olmoe-1b-7b", (4, 0)),  # norms of queries and keys over all heads, and copies of both
        ("mamba2-2.7b", (0, 0)), ("deepseek-v2-lite", (0, 0)),
    ],
)  # fmt: skip
def test_what_products_do_not_take_in_is_counted(name: str, of_layer: tuple[int, int]) -> None:
    arch = read_arch(SHAPES / name)
    apart = calibrated(arch, accelerator_named("h200")).timer.parts.apart
    assert (apart.n, apart.n_sums) == tuple(arch.n_layers * one for one in of_layer)


@pytest.mark.parametrize(
    ("name", "overrides", "of_layer"),
    [
        ("llama-3.1-8b", GRANITE, (2, 2)),  # both additions have a factor
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, (5, 0)),  # one beside norms and copies
    ],
)
def test_factors_and_limits_are_counted(name: str, overrides: dict[str, object], of_layer: tuple[int, int]) -> None:
    layer = read_arch(SHAPES / name, overrides).layers[0]
    assert launches_apart(layer, layer_parameters(layer, 2048, 0)) == Launches(*of_layer)


@pytest.mark.parametrize("n_rows", [1, 32])
def test_each_takes_a_third_of_a_plain_layers_three(n_rows: int) -> None:
    """Gemma 3 1B at one row and at 32: five launches of 2.1 microseconds in each of 26 layers."""
    timer = calibrated(read_arch(SHAPES / "gemma-3-1b"), accelerator_named("h200")).timer
    curve, one_s = timer.calibration.row_kernels, timer.calibration.row_kernels.fixed_s[-1] / PLAIN_LAUNCHES
    assert 1e-6 < one_s < 3e-6, "as profiled steps have norms, rotations and additions"
    rows_s = dict(timer.row_parts_s(n_rows))[ROW_KERNELS]
    assert rows_s == pytest.approx(26 * (curve.fixed(n_rows) + 5 * one_s), rel=0.2), "and the bytes"
    assert timer.step_s(decode_spans(n_rows, 100)) > 26 * 5 * one_s
