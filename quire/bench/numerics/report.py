"""The rows as a table for people, as plain values for a report, and what they say about the paper's claim.

Owns words and columns. Does not own the plot (`plot.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Final

from quire.bench.numerics.deviation import BASELINE, FLASH, OURS, Row

WIDTH: Final = 46
PAPER: Final = "Golden et al. 2024 (arXiv 2405.02803)"
ALIKE: Final = 1.5
"""Times the baseline's mean difference up to which kernels do not show what the paper describes."""
TENFOLD: Final = 5.0
"""From here on they do."""
SIXTEEN_BITS: Final = ("bf16", "fp16")


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """A block for each part, input and type; figures of the longest sequence, and means of the shorter ones."""
    blocks = dict.fromkeys((row.part, row.inputs, row.dtype) for row in rows)
    for part, inputs, dtype in blocks:
        block = [row for row in rows if (row.part, row.inputs, row.dtype) == (part, inputs, dtype)]
        yield from _block(block)


def _block(rows: Sequence[Row]) -> Iterator[str]:
    part, inputs, dtype = rows[0].part, rows[0].inputs, rows[0].dtype
    lengths = sorted({row.length for row in rows})
    last = "× baseline" if part == "attention" else "best token"
    what = f"{part}, {inputs}, {dtype}, {lengths[-1]:,} tokens"
    shorter = "".join(f"{n:>10,}" for n in lengths[:-1])
    yield f"{what:<{WIDTH}}{'largest':>10}{'mean':>10}{'Wasserst.':>11}{last:>11}" + (
        f"   mean at{shorter}" if shorter else ""
    )
    longest_first = sorted(rows, key=lambda row: -row.length)  # stable, and a long sequence has all the paths
    for path, tile in dict.fromkeys((row.path, row.tile) for row in longest_first):
        found = {row.length: row for row in rows if (row.path, row.tile) == (path, tile)}
        yield f"  {f'{path} ({tile})':<{WIDTH - 2}}{_figures(found.get(lengths[-1]))}" + (
            f"{'':10}" + "".join(f"{_mean(found.get(n)):>10}" for n in lengths[:-1]) if shorter else ""
        )


def _figures(row: Row | None) -> str:
    if row is None:
        return f"{'-':>10}{'-':>10}{'-':>11}{'-':>11}"
    found = row.deviation
    last = row.times_baseline if row.part == "attention" else found.best_agreement
    text = "-" if last is None else f"{last:.2%}" if row.part == "model" else f"{last:,.2f}"
    return f"{found.max_abs:>10.1e}{found.mean_abs:>10.1e}{found.wasserstein:>11.1e}{text:>11}"


def _mean(row: Row | None) -> str:
    return "-" if row is None else f"{row.deviation.mean_abs:.1e}"


def values(rows: Sequence[Row], skipped: dict[str, str]) -> dict[str, object]:
    """For a JSON report: a flat object for each row, what the rows say, and what was left out with its reason."""
    flat = []
    for row in rows:
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        del fields["deviation"]
        flat.append(fields | dataclasses.asdict(row.deviation))
    return {"rows": flat, "verdict": list(verdict(rows)), "left_out": dict(skipped)}


def verdict(rows: Sequence[Row]) -> Iterator[str]:
    """What the types of 16 bits say about the paper: a line for each input of attention, and one for each model's."""
    yield f"{PAPER}: in bf16 flash attention has about ten times the deviation of softmax written out."
    blocks = dict.fromkeys((row.part, row.inputs, row.dtype) for row in rows)
    for part, inputs, dtype in blocks:
        if dtype in SIXTEEN_BITS:
            listed = [row for row in rows if (row.part, row.inputs, row.dtype) == (part, inputs, dtype)]
            longest = [row for row in listed if row.length == max(one.length for one in listed)]
            yield from _of_attention(longest) if part == "attention" else _of_model(longest)


def _of_attention(rows: Sequence[Row]) -> Iterator[str]:
    ours, flash = (_ratios(rows, kind) for kind in (OURS, FLASH))
    if not ours:
        return
    if not all(map(math.isfinite, ours)):
        says = "give NaN or infinity"
    elif max(ours) <= ALIKE:
        says = "do not show it"
    else:
        says = "show it" if max(ours) >= TENFOLD else "show some of it"
    first = rows[0]
    text = f"; flash attention with every value in {first.dtype}: {_range(flash)} times" if flash else ""
    yield (
        f"  {first.dtype}, {first.inputs}, {first.length:,} tokens: Quire's kernels {says}, {_range(ours)} times{text}."
    )


def _ratios(rows: Sequence[Row], kind: str) -> list[float]:
    return [row.times_baseline for row in rows if row.kind == kind and row.times_baseline is not None]


def _range(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def _of_model(rows: Sequence[Row]) -> Iterator[str]:
    whole = next((row for row in rows if row.path == "all" and row.tile == "whole"), None)
    alone = {row.kind: row.deviation.mean_abs for row in rows if row.path.startswith("attention alone")}
    if whole is None or not alone.get(OURS):
        return
    ours, total = alone[OURS], whole.deviation.mean_abs
    text = f" (softmax written out: {alone[BASELINE]:.1e})" if BASELINE in alone else ""
    yield (
        f"  {whole.dtype}, logits after {whole.length:,} tokens: attention alone in {whole.dtype} moves them by "
        f"{ours:.1e} on average{text}, the whole model by {total:.1e}, {total / ours:.1f} times as much. (The "
        "paper, of trained weights: low precision 2 to 5 times as much as flash attention.)"
    )
