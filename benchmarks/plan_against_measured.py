"""`quire plan` and `quire simulate` beside whole-model runs on H200s on record: the table of docs/plan.md.

    python -m benchmarks.plan_against_measured [--output FILE] [--write]

Where several runs were alike, what is shown is their range, and how far off the one is that lies farthest away. `limit`
is the issue's: 5 % for W1 to W6 of the 8B, and W1 and W4 of the 0.6B; 10 % for other shapes, formats and
lengths, 12 % for several ranks, 15 % for first tokens. A line beyond its limit ends with a star (`BEYOND`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from benchmarks.plan_fit import FILE, write_calibration
from benchmarks.recorded_runs import RANKS, SHAPES, Figure, figures
from benchmarks.simulated_against_measured import decode_ms, simulate
from quire.bench.plan_check import cost_of_result
from quire.bench.shape import PREFIX
from quire.bench.simulate.figures import figures as simulated_figures
from quire.bench.simulate.requests import SimRequest, of_lengths, repeated, workload_requests
from quire.planner.accelerators import accelerator_named
from quire.planner.calibration import Record, load_calibration
from quire.planner.cost import CostModel
from quire.planner.error_bar import kinds_of, record_of
from quire.planner.operators import decode_spans, prefill_spans
from quire.planner.serving import closed_batch_s

PAGE: Final = pathlib.Path(__file__).parents[1] / "docs" / "plan.md"
TABLE: Final = re.compile(r"^ {40,}measured +planned.*?^median error [^\n]*limit", re.DOTALL | re.MULTILINE)
BARS: Final = re.compile(r"^\| kind \| figures .*?(?=\n\n)", re.DOTALL | re.MULTILINE)
LENGTHS: Final = str(pathlib.Path(__file__).with_name("w3_lengths.json"))
MOST_ROWS, MOST_SEQS = 8192, 1024
SHARED: Final = {"W5": 2048}
FIRST, SEVERAL, OTHERS, FITTED = 0.15, 0.12, 0.10, 0.05
"""Limits, see the module."""
BEYOND: Final = {
    ("qwen3-0.6b", "W1, tok/s"), ("gpt-oss-20b mxfp4", "W2, tok/s"),
    ("gpt-oss-20b", "1 x 1,024: decode, ms"), ("gpt-oss-20b", "8 x 1,024: decode, ms"),
    *(("gpt-oss-20b mxfp4", f"{n} x 1,024: decode, ms") for n in (8, 32, 128, 256)),
    ("gemma-3-1b", "1 x 32,000: decode, ms"), ("qwen3-30b-a3b even", "32 x 1,024: first token, ms"),
    ("gemma-3-1b", "1 x 32,000: first token, ms"), ("gemma-3-1b", "32 x 32,000: first token, ms"),
    ("llama-3.1-8b", "W2, tok/s"),
}  # fmt: skip
"""(shape, figure) that do not hold; docs/plan.md says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One figure, as expected."""

    shape: str
    what: str
    measured: tuple[float, ...]
    """Of all runs."""
    limit: float
    planned: float | None = None
    simulated: float | None = None
    kinds: frozenset[str] = frozenset()
    """See `error_bar.kinds_of`."""
    files: tuple[str, ...] = ()
    """Of benchmarks/results/h200, without their ending."""

    def error(self, expected: float | None) -> float | None:
        """Of the run that is farthest from it; 0.05 is 5 % too much."""
        return None if expected is None else max((expected / one - 1 for one in self.measured), key=abs)

    @property
    def errors(self) -> list[float]:
        """Of what there is."""
        return [one for one in map(self.error, (self.planned, self.simulated)) if one is not None]

    @property
    def holds(self) -> bool:
        """Whether all are within the limit."""
        return all(abs(one) <= self.limit for one in self.errors)

    def text(self) -> str:
        """For people."""
        low, high = min(self.measured), max(self.measured)
        measured = number(low) if number(low) == number(high) else f"{number(low)} to {number(high)}"
        cells = [
            cell for expected in (self.planned, self.simulated) for cell in cells_of(expected, self.error(expected))
        ]
        return (
            f"{self.shape:<24}{self.what:<29}{measured:>16}" + "".join(f"{cell:>10}" for cell in cells)
            + f"{f'{100 * self.limit:.0f} %':>7}{'  ' if self.holds else ' *'} {', '.join(self.files)}"
        )  # fmt: skip


def cells_of(expected: float | None, error: float | None) -> tuple[str, str]:
    """The value, and how far off it is."""
    return ("", "") if expected is None or error is None else (number(expected), f"{100 * error:+.1f} %")


def number(value: float) -> str:
    """In four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def shape_of(one: Figure) -> str:
    """Model, formats and ranks; even: rows choose experts in turn."""
    options = one.options
    words = [options["model"], options.get("quantization", "")]
    words += [f"kv {options['kv_cache_dtype']}"] if "kv_cache_dtype" in options else []
    words += [f"{flag[1:]} {options[name]}" for flag, name in RANKS.items() if name in options]
    words += [options.get("context_parallel_method", "")]
    given = options.get("hf_overrides", {})
    words += [str(given["quantization_config"]["quant_method"])] if "quantization_config" in given else []
    words += ["even"] if given.get("even_routing") else []
    return " ".join(filter(None, words))


def limit_of(one: Figure) -> float:
    """See the module."""
    options = one.options
    if one.what == "first":
        return FIRST
    if any(name in options for name in RANKS.values()):
        return SEVERAL
    is_plain = options["model"] == "llama-3.1-8b" and not {"quantization", "kv_cache_dtype"} & options.keys()
    is_known = is_plain and one.n_in != 256
    is_w4 = options.get("max_model_len") == 8704 and "quantization" not in options
    return FITTED if is_known or is_w4 or one.what == "W1" else OTHERS


@functools.cache
def cost_of(config: tuple[tuple[str, Any], ...]) -> CostModel:
    """Of steps of a run."""
    options = {name: json.loads(value) for name, value in config}
    options["model"] = PREFIX + options["model"]
    return cost_of_result({"config": {"quantization": "auto"} | options}, accelerator_named("h200"))


def requests_of(workload: str) -> list[SimRequest]:
    """'W2 x 4': all of its requests four times."""
    name, _, times = workload.partition(" x ")
    found = workload_requests(name, LENGTHS)
    return repeated(found, len(found) * int(times or 1))


def planned(one: Figure) -> float | None:
    """None: the closed form has none, since prompts come in several steps, or requests are dealt out to ranks."""
    cost, n = cost_of(one.config), one.batch
    if one.what == "decode":
        return 1e3 * cost.step_s(decode_spans(n, one.n_in + one.n_out // 2))
    if one.what == "first":
        is_one_step = n * one.n_in <= MOST_ROWS
        return 1e3 * (cost.step_s(prefill_spans(one.n_in, 0, n)) + cost.first_token_s) if is_one_step else None
    if cost.timer.mesh.dp > 1:
        return None
    lengths = [(one.input_len, one.output_len) for one in requests_of(one.what)]
    seconds = closed_batch_s(cost, lengths, MOST_SEQS, MOST_ROWS, 1 << 60, SHARED.get(one.what, 0))
    return sum(n_out for _, n_out in lengths) / seconds


@functools.cache
def _batch(config: tuple[tuple[str, Any], ...], n: int, n_in: int, n_out: int) -> tuple[float, float]:
    """(mean first token, decode step) in ms."""
    run, timeline = simulate(engine_options(config), of_lengths([(n_in, n_out)] * n), "h200")
    return float(simulated_figures(run)["mean_ttft_ms"] or 0), decode_ms(timeline.columns(), n)


def engine_options(config: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """For `simulate`."""
    options = {name: json.loads(value) for name, value in config}
    return options | {"model": str(SHAPES / options["model"])}


def simulated(one: Figure) -> float | None:
    """None: formats that no engine is given (`quantization` of a checkpoint), and single steps of `LENGTHS`."""
    options = one.options
    if options.get("quantization") == "mxfp4" or one.n_in == 256:
        return None
    if one.what in ("decode", "first"):
        first, step = _batch(one.config, one.batch, one.n_in, one.n_out)
        return step if one.what == "decode" else first
    run, _ = simulate(engine_options(one.config), requests_of(one.what), "h200")
    return float(simulated_figures(run)["output_throughput"] or 0)


def title(one: Figure) -> str:
    """What was measured."""
    if one.what not in ("decode", "first"):
        return f"{one.what}, tok/s"
    return f"{one.batch} x {one.n_in:,}: {'first token' if one.what == 'first' else 'decode'}, ms"


def lines() -> list[Line]:
    """Of all figures, those of one shape together."""
    found = [
        Line(
            shape_of(one),
            title(one),
            tuple(run.measured for run in runs),
            limit_of(one),
            planned(one),
            simulated(one),
            kinds_of(cost_of(one.config).timer),
            tuple(dict.fromkeys(run.file for run in runs)),
        )
        for one, runs in figures().items()
    ]
    order = list(dict.fromkeys(one.shape for one in found))
    return sorted(found, key=lambda one: (order.index(one.shape), one.what[0] != "W"))


def table(found: list[Line]) -> Iterator[str]:
    """For people."""
    names = ("planned", "off by", "simulated", "off by")
    yield f"{'':<24}{'':<29}{'measured':>16}" + "".join(f"{name:>10}" for name in names) + f"{'limit':>7}   record"
    yield from (one.text() for one in found)
    errors = [abs(error) for one in found for error in one.errors]
    n_held = sum(one.holds for one in found)
    yield f"median error {100 * statistics.median(errors):.1f} %; {n_held} of {len(found)} lines are within their limit"


def records(found: list[Line]) -> tuple[Record, ...]:
    """What error bars are made of: of each kind the figure that is farthest away, plans and simulations alike."""
    ratios: dict[frozenset[str], list[tuple[float, str]]] = {}
    for one in found:
        expected = [each for each in (one.planned, one.simulated) if each is not None]
        for measured in one.measured:
            farthest = max((measured / each for each in expected), key=lambda ratio: abs(math.log(ratio)))
            ratios.setdefault(one.kinds, []).append((farthest, f"{one.shape} {one.what.rpartition(',')[0]}"))
    return tuple(record_of(kinds, each) for kinds, each in ratios.items())


def bars_table(found: list[Line]) -> Iterator[str]:
    """The error bars, as Markdown."""
    yield from ("| kind | figures | farthest | |", "|---|---|---|---|")
    for one in records(found):
        kind = ", ".join(one.kinds) or "plain"
        yield f"| {kind} | {one.n_figures} | {one.farthest} | {100 * one.error:.0f} % |"


def rewritten(page: str, found: list[Line]) -> str:
    """The page with these tables in the place of its own."""
    for pattern, lines_of in ((TABLE, table), (BARS, bars_table)):
        old = pattern.search(page)
        assert old is not None, "the page has both tables"
        page = page[: old.start()] + "\n".join(lines_of(found)) + page[old.end() :]
    return page


def main(say: Callable[[str], None] = print) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="the same as JSON")
    parser.add_argument("--write", action="store_true", help="into docs/plan.md, and error bars into h200.json")
    options = parser.parse_args()
    found = lines()
    for text in table(found):
        say(text)
    if options.output:
        rows = [dataclasses.asdict(one) | {"holds": one.holds, "kinds": sorted(one.kinds)} for one in found]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if options.write:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
        write_calibration(msgspec.structs.replace(load_calibration(FILE), records=records(found)))


if __name__ == "__main__":
    main()
