"""Fits `quire/planner/calibrations/h200.json` to a few recorded runs: `python -m benchmarks.plan_fit --write`. With
`--kernels --write` only the curves of kernels that were timed alone are made anew.

Fitted: W4 of both shapes and W6 of the 8B shape at batches of 32 and 256, by the parts of their profiled steps, and
the prompts of the latter, at 256 as long as the mean of several chips; of docs/lab-notes.md the products that go on for
0.35 s at 512 and 1,024 rows (section 12) and decode attention (section 14). Kernels that the 8B and the 0.6B in
bfloat16 have not are those of `plan_kernels`.
All else that docs/plan.md compares is predicted. Prints every case beside what was measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.plan_kernels import (
    FLOAT32_FLOPS,
    RESULTS,
    SHAPES,
    attention_curves,
    coded_curves,
    expert_curves,
    sums_of_ranks,
)
from benchmarks.plan_products import filled
from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.core.plan import Spans
from quire.planner.calibration import FOLDER, Calibration, Curve, load_calibration
from quire.planner.fitting import curve_knobs, descend
from quire.planner.formats import Formats
from quire.planner.operators import decode_spans, prefill_spans
from quire.planner.timing import StepTimer

FILE = FOLDER / "h200.json"
FITTED = {("w4_8b", 1), ("w4_06b", 1), ("w6", 32), ("w6", 256)}
"""(file, batch) of the runs that are fitted."""
SUSTAINED_US = ((512, 368.0), (1024, 685.0))
"""Products of a layer of the 8B shape, with the activation, as long as the chip is at its power limit: rows and
microseconds. A profiled step of a moment is 10 % faster, and no engine has such a moment for long."""
ATTENTION_US = ((512, 400, 196.4), (256, 1024, 244.4), (64, 1024, 68.1), (8, 1024, 13.2), (1, 300, 6.1),
                (64, 16384, 945.0))  # fmt: skip
"""(sequences, tokens, microseconds) of decode attention in a layer of the 8B shape, after, in section 14."""
ON_CHIPS = ("w6", 256)
"""(file, batch) of a step that is the mean of several chips, which differ at their power limit: `chips`."""
MOST_ROWS, PROMPT = 8192, 1024
"""Of a step, and a prompt of W6."""
PRODUCT_ROWS = (1, 32, 256, 512, 1024, 8192)
START = Calibration(
    device="h200", source="", read_bytes_per_s=4.39e12,
    flops_per_s={"bfloat16": 790e12, "fp8": 1470e12, "float32": FLOAT32_FLOPS},
    products={"bfloat16": Curve(
        rows=PRODUCT_ROWS, fixed_s=(2.8e-6, 2.8e-6, 6e-6, 6e-6, 6e-6, 6e-6), flops_share=(0.95,) * 6, tile=64,
    )},
    experts={"bfloat16": Curve()},
    attention=Curve(rows=(1, 1024), fixed_s=(5e-6, 24e-6), flops_share=(0.75,)),
    state=Curve(fixed_s=(5e-6,), bytes_share=0.8, flops_share=(0.02,)),
    row_kernels=Curve(rows=(1, 2), fixed_s=(1e-6, 6e-6)),
    step_s=60e-6, row_s=0.14e-6, first_token_s=1.1e-3, host_s=0.2e-3, host_row_s=2.5e-6, captured=1024,
    error=0.05,
)  # fmt: skip
"""Where the search begins. Not fitted, and not measured here: states; type fp8 (a published rate). host_s and
host_row_s: lab notes, section 13."""

Case = dict[str, Any]


def cases() -> list[Case]:
    """Every latency run that has a breakdown."""
    found = []
    for name in ("w4_8b", "w6", "w4_06b"):
        arch = read_arch_of("qwen3-0.6b" if "06b" in name else "llama-3.1-8b")
        for row in json.loads((RESULTS / f"{name}.json").read_text())["results"]["cases"]:
            batch, n_in, n_out = row["batch_size"], row["input_len"], row["output_len"]
            spans = decode_spans(batch, n_in + n_out // 2) if n_out > 1 else prefill_spans(n_in)
            step_ms, device = row.get("decode_step_ms"), row["breakdown"]["device_ms"]
            if (name, batch) == ON_CHIPS:
                mean_ms = statistics.mean(step_ms for step_ms, _ in chips())
                device = {part: ms * mean_ms / step_ms for part, ms in device.items()}
                step_ms = mean_ms
            found.append({
                "file": name, "arch": arch, "batch": batch, "input": n_in, "decodes": n_out > 1, "spans": spans,
                "device": device, "step_ms": step_ms,
                "first_ms": row["median_ttft_ms"], "is_fitted": (name, batch) in FITTED,
            })  # fmt: skip
    return found


def parts_ms(timer: StepTimer, spans: Spans) -> dict[str, float]:
    return {name: 1e3 * seconds for name, seconds in timer.parts_s(spans).items()}


def loss(calibration: Calibration, fitted: list[Case]) -> float:
    """Squares of what parts are off, to the whole step."""
    total = 0.0
    for case in fitted:
        found = parts_ms(StepTimer(case["arch"], calibration, Formats(), Mesh()), case["spans"])
        device = dict(case["device"])
        if case["decodes"]:
            device["other kernels"] += device["gaps"]
        else:  # the profiled step was a moment's: what the timed ones took is shared out as it was
            times = (case["first_ms"] - 1e3 * calibration.first_token_s) / sum(device[name] for name in found)
            device = {name: ms * times for name, ms in device.items()}
        whole = sum(device[name] for name in found)
        total += sum(((found[name] - device[name]) / whole) ** 2 for name in found)
        total += (sum(found.values()) / whole - 1) ** 2
        total += 0.1 * sum((found[name] / device[name] - 1) ** 2 for name in found)
    timer = StepTimer(read_arch_of("llama-3.1-8b"), calibration, Formats(), Mesh())
    for n_rows, us in SUSTAINED_US:
        found_us = 1e6 * sum(timer.product_s(one, n_rows) for one in timer.parts.products)
        total += (found_us / us - 1) ** 2
    for n_seqs, context, us in ATTENTION_US:
        found_us = 1e6 * timer.attention_s(decode_spans(n_seqs, context)) / timer.parts.n_layers
        total += 0.1 * (found_us / us - 1) ** 2
    spans, seconds = prompts_going_on()
    return total + 10 * (timer.step_s(spans) / seconds - 1) ** 2  # most of what engines do to prompts


def whole_steps() -> list[tuple[float, int]]:
    """(milliseconds, sequences) of the steps of w6.json that are full of prompts."""
    line = json.loads((RESULTS / "w6.json").read_text())["timeline"]
    steps = zip(line["time_s"], line["time_s"][1:], line["n_tokens"][1:], line["n_running"][1:], strict=False)
    return [(1e3 * (after - before), n) for before, after, n_rows, n in steps if n_rows == MOST_ROWS]


def chips() -> list[tuple[float, float]]:
    """Milliseconds of W6 at 256 on each chip on record: (a decode step, a step of prompts, or 0 if nobody kept it)."""
    own = json.loads((RESULTS / "w6.json").read_text())["results"]["cases"][-1]["decode_step_ms"]
    found = {"": (float(own), statistics.median(ms for ms, _ in whole_steps()))}
    for run in json.loads((RESULTS / "dense_pairs.json").read_text())["runs"]:
        is_plain = "--workload W6" in run["command"] and "--quantization" not in run["command"]
        if is_plain and "left_out" not in run:
            step_ms = run["results"]["cases"][-1]["decode_step_ms"]
            found.setdefault(run["chip"], (float(step_ms), float(run.get("prompt_step_ms", 0))))
    return list(found.values())


@functools.cache
def prompts_going_on() -> tuple[Spans, float]:
    """A step of W6 at 256 in the middle of its prompts, and its seconds, the mean of the `chips` that were watched: a
    chip is at its power limit by then, as in any engine that has work. Eight prompts beside sequences that decode."""
    n_decodes = round(statistics.median(n for _, n in whole_steps())) - MOST_ROWS // PROMPT
    spans = decode_spans(n_decodes, PROMPT + n_decodes // 16)
    for i in range(MOST_ROWS // PROMPT):
        spans.add(n_decodes + i, 0, PROMPT - (n_decodes if i == 0 else 0), True)
    return spans, 1e-3 * statistics.mean(prompt_ms for _, prompt_ms in chips() if prompt_ms)


@functools.cache
def read_arch_of(shape: str) -> ModelArch:
    return read_arch(SHAPES / shape)


def fit(start: Calibration, fitted: list[Case]) -> Calibration:
    """The numbers of products, attention and row kernels."""
    fields = ("fixed_s", "bytes_share", "flops_share")
    parts = ("products.bfloat16", "attention", "row_kernels")
    knobs = [knob for part in parts for knob in curve_knobs(start, part, fields)]
    # Few rows are bound by memory: their rate of arithmetic cannot be told from a fixed cost.
    knobs = [knob for knob in knobs if knob[:2] != ("products.bfloat16", "flops_share") or knob[2] > 1]
    return descend(start, lambda tried: loss(tried, fitted), knobs, least_share=0.0)  # it may take a minute


def with_kernels(calibration: Calibration) -> Calibration:
    """With the curves of kernels that were timed alone."""
    found = msgspec.structs.replace(calibration, experts=expert_curves(calibration), sums=sums_of_ranks())
    plain = filled(calibration.products["bfloat16"], PRODUCT_ROWS, calibration)
    coded = coded_curves(plain, calibration)
    return msgspec.structs.replace(found, products=coded, attentions=attention_curves(calibration))


def rounded(value: Any) -> Any:
    """Three digits are more than the runs have."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def write_calibration(found: Calibration) -> None:
    """As the one that comes with Quire."""
    FILE.write_text(json.dumps(rounded(msgspec.to_builtins(found)), indent=1) + "\n")


def main(say: Callable[[str], None] = print) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="fit nothing: only the curves of kernels timed alone")
    options = parser.parse_args()
    known = cases()
    fitted = load_calibration(FILE) if options.kernels else fit(START, [one for one in known if one["is_fitted"]])
    found = with_kernels(fitted)
    source = "benchmarks/plan_fit.py: W4 of both shapes, W6 8B at 32, and at 256 on four H200s; kernels timed alone"
    found = msgspec.structs.replace(found, source=source)
    for case in known:
        timer = StepTimer(case["arch"], found, Formats(), Mesh())
        total = 1e3 * timer.step_s(case["spans"]) + (0 if case["decodes"] else 1e3 * found.first_token_s)
        measured = case["step_ms"] if case["decodes"] else case["first_ms"]
        parts = ", ".join(f"{k} {v:.3f}/{case['device'][k]:.3f}" for k, v in parts_ms(timer, case["spans"]).items())
        say(f"{case['file']:<7} {case['batch']:>3} x {case['input']:<5}{'fitted ' if case['is_fitted'] else '       '}"
            f"{total:9.3f} ms, measured {measured:9.3f}: {100 * (total / measured - 1):+.1f} %   {parts}")  # fmt: skip
    spans, seconds = prompts_going_on()
    found_ms = 1e3 * StepTimer(read_arch_of("llama-3.1-8b"), found, Formats(), Mesh()).step_s(spans)
    say(f"w6      256, a step of prompts  fitted {found_ms:9.3f} ms, measured {1e3 * seconds:9.3f}")
    if options.write:
        write_calibration(msgspec.structs.replace(found, records=load_calibration(FILE).records))


if __name__ == "__main__":
    main()
