"""Curves of `quire/planner/calibrations/h200.json` that follow from kernels timed alone: no whole model is in them.

Read from benchmarks/results/h200: experts from kernels_moe.json, products in FP8 and 4 bits, timed by rows, from
kernels_products.json (`plan_products`), lines from kernels_mla.json, keys and values in e4m3 and what a sequence costs
from kernels_lengths.json, sums over ranks from collectives_2xh200.json and collectives_4xh200.json. `plan_fit` puts
them in its file.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

import msgspec
import numpy

import quire
from benchmarks.plan_products import product_curves
from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.accelerators import accelerator_named
from quire.planner.calibration import LATENT, Calibration, Curve, Sums, Way
from quire.planner.formats import FORMATS, Formats
from quire.planner.timing import StepTimer

RESULTS: Final = pathlib.Path(__file__).with_name("results") / "h200"
SHAPES: Final = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
FORMS: Final = {"bf16": "bfloat16", "fp8 blocks": "fp8", "mxfp4": "mxfp4", "int4 g128": "int4-g128"}
"""A form of the benchmark → the format of the planner."""
CHOICE_S: Final = 3.1e-6
"""Of experts, in a launch of its own (kernels_moe_codes.json, 256 rows; the same at any number up to that)."""
TILES: Final = ((0, 16), (10, 64), (40, 128))
"""As `kernels/moe/plan` chooses them: 16 rows hold ten in the mean and what more some experts have."""
ROUTER_US: Final = {1: 4.1, 32: 6.1, 256: 10.6}
"""Rows → a router in float32 and the choice in one launch, in a step of DeepSeek-V2-Lite (docs/lab-notes.md)."""
FLOAT32_FLOPS: Final = 67e12
"""Published; nobody measured it."""
MXFP4_SHAPES, LARGE = ("qwen3-30b-a3b", "gpt-oss-20b"), "experts gpt-oss-20b mxfp4"
"""Whose experts in MXFP4 were timed, and what kernels_lengths.json calls the second's."""
HEADS, HEAD_DIM = (32, 8), 128
"""Of queries and of keys, of the 8B shape."""
LEAST_KIB: Final = {"one_shot": 8, "two_shots": 512}
"""Shorter ones go another way."""


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a file."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def times_of(name: str, implementation: str) -> dict[str, dict[str, Any]]:
    """Case → what was measured, of a report of `quire bench kernels`."""
    times = json.loads((RESULTS / f"{name}.json").read_text())["results"]["times"]
    return {one["case"]: one for one in times if one["implementation"] == implementation and one["time_s"]}


def line(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """(seconds at 0, a byte's seconds) through two points (bytes, seconds)."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return small[1] - slope * small[0], slope


def even(shape: str) -> ModelArch:
    """With experts chosen in turn, as in the benchmark."""
    return read_arch(SHAPES / shape, {"even_routing": True})


def expert_curves(calibration: Calibration) -> dict[str, Curve]:
    """The rate of reads is that between 1 and 32 rows, of arithmetic that of the most rows, as if nothing else bound
    them; fixed costs are what is left of each measured time."""
    table: dict[str, list[tuple[int, float]]] = {}
    for row in rows_of("kernels_moe"):
        if row["shape"] == "qwen3-30b-a3b":
            table.setdefault(FORMS[row["form"]], []).append((row["rows"], row["us"] * 1e-6))
    found, arch = {}, even("qwen3-30b-a3b")
    for name, measured in table.items():
        weights = FORMATS[name]
        timer = StepTimer(arch, calibration, Formats(weights=weights), Mesh())
        experts = [one for one in timer.parts.products if one.is_experts]
        n_most, most_s = measured[-1]
        rate = sum(one.flops(n_most) for one in experts) / most_s
        (_, few_s), (n_few, many_s) = measured[0], measured[2]  # all experts by then, and bound by reading them
        few_bytes, many_bytes = (sum(one.read_bytes(n) for one in experts) for n in (1, n_few))
        _, byte_s = line((few_bytes, few_s), (many_bytes, many_s))
        free = Curve(
            tiles=TILES, bytes_share=1 / (byte_s * calibration.read_bytes_per_s),
            flops_share=(1.01 * rate / calibration.rate(weights.products),),
        )  # fmt: skip
        trial = msgspec.structs.replace(calibration, experts={"bfloat16": free})
        timer = StepTimer(arch, trial, Formats(weights=weights), Mesh())
        left = [max(0.0, s - sum(timer.product_s(one, n) for one in experts)) + CHOICE_S for n, s in measured]
        found[name] = msgspec.structs.replace(free, rows=tuple(n for n, _ in measured), fixed_s=tuple(left))
    found["mxfp4"] = with_lone_token(found["mxfp4"], table["mxfp4"][0][1], calibration)
    return found


def with_lone_token(curve: Curve, known_s: float, calibration: Calibration) -> Curve:
    """Experts in MXFP4. What those of gpt-oss-20b, which are five times as large, take longer than Qwen3-30B-A3B's for
    a lone token has no fixed cost in it, and is nearly twice what reading takes as fast as for more tokens: few blocks
    have work, and undo codes one after the other. known_s: of Qwen3's."""
    (large_s,) = (1e-6 * one["us"] for one in rows_of("kernels_lengths") if one["what"] == LARGE and one["rows"] == 1)

    def both(share: float) -> list[float]:
        free = msgspec.structs.replace(curve, fixed_s=(0.0,), flops_share=(share,))
        trial = msgspec.structs.replace(calibration, experts={"bfloat16": free})
        timers = [StepTimer(even(shape), trial, Formats(weights=FORMATS["mxfp4"]), Mesh()) for shape in MXFP4_SHAPES]
        return [sum(one.product_s(part, 1) for part in one.parts.products if part.is_experts) for one in timers]

    low, high = curve.flops_share[0] / 1000, curve.flops_share[0]
    for _ in range(50):
        middle = (low * high) ** 0.5
        few_s, many_s = both(middle)
        low, high = (middle, high) if many_s - few_s > large_s - known_s else (low, middle)
    fixed_s = max(0.0, known_s - both(high)[0]) + CHOICE_S
    shares = (high, *curve.flops_share * (len(curve.rows) - 1))
    return msgspec.structs.replace(curve, fixed_s=(fixed_s, *curve.fixed_s[1:]), flops_share=shares)


def coded_curves(bf16: Curve, calibration: Calibration) -> dict[str, Curve]:
    """bfloat16's, a router's in float32, and those of weights in codes, as timed by rows."""
    router_s = tuple(max(0.0, 1e-6 * us - CHOICE_S) for us in ROUTER_US.values())
    router = Curve(rows=tuple(ROUTER_US), fixed_s=router_s, flops_share=(0.8,))
    return {"bfloat16": bf16, "float32": router} | product_curves(bf16, calibration)


def decode_lines(rows: list[dict[str, Any]], name: str, number_bytes: int) -> tuple[float, float, float]:
    """Seconds of a layer, of a byte, and of a sequence and KV head: least squares of relative errors."""
    times = numpy.array([1e-6 * row[name] for row in rows])
    n_lines = numpy.array([row["sequences"] * HEADS[1] for row in rows])
    n_bytes = n_lines * numpy.array([2 * row["tokens"] * HEAD_DIM * number_bytes for row in rows])
    columns = numpy.stack([numpy.ones(len(rows)), n_bytes, n_lines], axis=1) / times[:, None]
    fixed_s, byte_s, line_s = numpy.linalg.lstsq(columns, numpy.ones(len(rows)), rcond=None)[0]
    return float(fixed_s), float(byte_s), float(line_s)


def attention_curves(calibration: Calibration) -> dict[str, Curve]:
    """Of lines, and of keys and values in e4m3."""
    reads, rate = calibration.read_bytes_per_s, calibration.rate("bfloat16")
    lines = times_of("kernels_mla", "hopper-latent")
    many, wide = lines["decode 64 x 4k, 16 heads"], lines["decode 64 x 4k, 128 heads"]
    fixed_s = many["time_s"] - many["time_s"] * many["bytes_s"] / reads
    arithmetic_s = wide["time_s"] - fixed_s
    share = wide["flops_s"] * wide["time_s"] / arithmetic_s / rate
    latent = Curve(rows=(1, 1024), fixed_s=(fixed_s, calibration.attention.fixed_s[-1]), flops_share=(share,))
    rows = rows_of("kernels_lengths")
    e4m3_s, byte_s, line_s = decode_lines([row for row in rows if row["what"] == "decode"], "e4m3_us", 1)
    longest, shorter = ([row for row in rows if row["what"] == "prompts"][i] for i in (-1, -2))
    (few, few_s), (most, most_s) = (
        (2.0 * HEADS[0] * HEAD_DIM * row["tokens"] ** 2, 1e-6 * row["e4m3_us"]) for row in (shorter, longest)
    )  # half of the pairs are seen
    e4m3 = Curve(
        rows=(1, 1024), fixed_s=(e4m3_s, max(0.0, line((few, few_s), (most, most_s))[0])),
        bytes_share=1 / (byte_s * reads), line_s=line_s, flops_share=((most - few) / (most_s - few_s) / rate,),
    )  # fmt: skip
    return {LATENT: latent, "fp8": e4m3}


def way_of_sums(n_ranks: int, name: str) -> Way:
    """The line of least squares, of relative errors, through one column of so many ranks."""
    report = json.loads((RESULTS / f"collectives_{n_ranks}xh200.json").read_text())
    times = n_ranks - 1 if name == "one_shot" else 2 * (n_ranks - 1) / n_ranks
    rows = [row for row in report["microseconds"] if row["kib"] >= LEAST_KIB[name]]
    points = [(1024 * row["kib"] * times, 1e-6 * row[name]) for row in rows]
    total = sum(seconds**-2 for _, seconds in points)
    mean_bytes = sum(sent / seconds**2 for sent, seconds in points) / total
    mean_s = sum(1 / seconds for _, seconds in points) / total
    spread = sum((sent - mean_bytes) ** 2 / seconds**2 for sent, seconds in points)
    byte_s = sum((sent - mean_bytes) / seconds for sent, seconds in points) / spread
    link_share = 1 / byte_s / accelerator_named("h200").link_bytes_per_s
    return Way(latency_s=mean_s - byte_s * mean_bytes, link_share=link_share)


def sums_of_ranks() -> Sums:
    """Each way's latency and its share of the link."""
    return Sums(
        pair=way_of_sums(2, "one_shot"), one_hop=way_of_sums(4, "one_shot"), two_hops=way_of_sums(4, "two_shots")
    )
