"""The share of the limit that a run attained: the planner's operators of its steps against its clock. Needs no torch.

Invariant: a limit counts what the recorded steps had to do, not what the engine made of it. Which experts a step chose
is not recorded: of each layer, how often all steps chose each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.engine.step_record import StepRecord
from quire.planner.calibration import Ceilings
from quire.planner.counted_experts import CountedExperts, counted_operator
from quire.planner.formats import Formats
from quire.planner.mesh import own_rows
from quire.planner.operators import Kind, Operator, limit_s, step_operators
from quire.planner.parts import rank_parts

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


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is held to its limit."""

    arch: ModelArch
    formats: Formats
    page_size: int
    mesh: Mesh = Mesh()
    """A limit is of one rank of it, and of all its stages."""
    experts: CountedExperts = CountedExperts(())
    """How often rows chose them; by default as if evenly."""

    def operators(self, record: StepRecord) -> list[Operator]:
        """Of a step; what several sequences share is read once."""
        n_pages = sum((len(slots) - 1) * n_pages for slots, n_pages in record.shared_prefixes)
        parts = rank_parts(self.arch, self.mesh, self.formats)
        found = step_operators(
            self.arch, record.spans, self.mesh, self.formats, n_pages * self.page_size, parts
        )  # fmt: skip
        n_rows = own_rows(self.mesh, sum(record.spans.lengths))
        products = iter([one for one in parts.products if one.is_experts])
        return [
            counted_operator(self.experts, next(products), n_rows, self.formats) if one.kind is Kind.EXPERTS else one
            for one in found
        ]

    def counted(self, counts: Sequence[Sequence[int]]) -> Case:
        """The same where rows chose experts so, see `CountedExperts.of`."""
        return msgspec.structs.replace(self, experts=CountedExperts.of(counts, self.mesh.ep))


PARTS = {
    Kind.GATHER: "other kernels", Kind.ROWS: "other kernels", Kind.PRODUCT: "linear", Kind.EXPERTS: "experts",
    Kind.ATTENTION: "attention", Kind.STATE: "state", Kind.COLLECTIVE: "sums over ranks",
}  # fmt: skip
"""Where a breakdown has operators of a kind."""


def part_limits_ms(
    case: Case, ceilings: Ceilings, records: Sequence[StepRecord], link_bytes_per_s: float = 0.0
) -> dict[str, float]:
    """The least ms of each part of a breakdown, the mean of some steps. link_bytes_per_s: one way, of a device to the
    others; 0: unknown, and sums have no limit."""
    found: dict[str, float] = {}
    for record in records:
        for one in case.operators(record):
            seconds = one.limit_s(ceilings)
            if one.kind is Kind.COLLECTIVE:
                seconds = one.n_times * one.wire_bytes / link_bytes_per_s if link_bytes_per_s else 0.0
            found[PARTS[one.kind]] = found.get(PARTS[one.kind], 0.0) + 1e3 * seconds / len(records)
    return found


def step_limits_s(case: Case, ceilings: Ceilings, records: Iterable[StepRecord]) -> list[float]:
    """The least seconds of each step."""
    return [limit_s(case.operators(record), ceilings) for record in records]


def compared(figure: str, limit: float, attained: float) -> dict[str, float]:
    """One entry of `LimitShares`."""
    share = attained / limit if figure in RATES else limit / attained
    return {"limit": limit, "attained": attained, "share": share}


def lines(limits: Mapping[str, Mapping[str, float]], *, has_experts: bool) -> list[str]:
    """For people: `limit 3.52 ms a decode step; attained 4.05 = 87 %`, and one line of all that cannot be limits."""
    beyond = {figure: row for figure, row in limits.items() if row["share"] > MOST_SHARE}
    found = [_line(figure, row) for figure, row in limits.items() if figure not in beyond]
    return found + ([_beyond(beyond, has_experts)] if beyond else [])


def _line(figure: str, row: Mapping[str, float]) -> str:
    share = 100 * row["share"]
    return (
        f"limit {_number(row['limit'])} {MEANINGS[figure]}; attained {_number(row['attained'])} = "
        f"{share:.{0 if share >= 10 else 1}f} %"
    )


def _beyond(rows: Mapping[str, Mapping[str, float]], has_experts: bool) -> str:
    attained = ", ".join(
        f"{_number(row['attained'])} {MEANINGS[figure]} (limit {_number(row['limit'])})" for figure, row in rows.items()
    )
    experts = ", or the rows of a step chose fewer experts than rows that are apart would" if has_experts else ""
    return (
        f"attained {attained}: faster than these limits, which therefore do not hold. "
        f"Other work slowed the measurement of the ceilings, or the weights fit a cache{experts}"
    )


def ceilings_line(ceilings: Ceilings, products: str) -> str:
    """What the limits stand on; products: the types of the matrix products, in words."""
    return (
        f"ceilings in this run: reads {_number(ceilings.read_bytes_per_s / 1e9)} GB/s, "
        f"{products} products {_number(max(ceilings.flops_per_s.values()) / 1e12)} TFLOP/s"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
