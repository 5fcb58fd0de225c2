"""The share of the limit that a run attained: the planner's cost of its steps against its clock. Needs no torch.

Invariant: a limit counts what the recorded steps had to do, not what the engine made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quire.engine.step_record import StepRecord
from quire.planner.cost import CostModel
from quire.planner.hardware import Hardware

MEANINGS = {
    "output_tokens_per_second": "output tok/s",
    "decode_step_ms": "ms a decode step",
    "first_token_ms": "ms to the first token",
    "latency_ms": "ms in all",
}
RATES = ("output_tokens_per_second",)
"""Figures that are better when higher."""
MOST_SHARE = 1.25
"""Beyond it the ceilings were too low: they are measured to some percent."""
LimitShares = dict[str, dict[str, float]]
"""Figure → limit, attained, share."""


def step_limits_s(cost: CostModel, records: Iterable[StepRecord]) -> list[float]:
    """The least seconds of each step."""
    return [cost.limit_s(cost.work(record.spans, record.shared_prefixes)) for record in records]


def compared(figure: str, limit: float, attained: float) -> dict[str, float]:
    """One entry of `LimitShares`."""
    share = attained / limit if figure in RATES else limit / attained
    return {"limit": limit, "attained": attained, "share": share}


def lines(limits: Mapping[str, Mapping[str, float]]) -> list[str]:
    """For people: `limit 3.52 ms a decode step; attained 4.05 = 87 %`; no share where it cannot be one."""
    return [_line(figure, row) for figure, row in limits.items()]


def _line(figure: str, row: Mapping[str, float]) -> str:
    share, attained = row["share"], f"{_number(row['attained'])} {MEANINGS[figure]}"
    if share > MOST_SHARE:
        return (
            f"attained {attained}; the limit from this run's ceilings, {_number(row['limit'])}, is none: other work "
            "kept the cores from their best while these were measured, or the weights fit a cache, or of experts fewer "
            "were chosen than an even choice touches"
        )
    return f"limit {_number(row['limit'])} {MEANINGS[figure]}; attained {_number(row['attained'])} = " + (
        f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
    )


def ceilings_line(hardware: Hardware, products: str) -> str:
    """What the limits stand on; products: the types of the matrix products, in words."""
    return (
        f"ceilings in this run: reads {_number(hardware.bandwidth_bytes_per_s / 1e9)} GB/s, "
        f"{products} products {_number(hardware.flops_per_s / 1e12)} TFLOP/s"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
