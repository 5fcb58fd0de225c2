"""Random inputs of the recurrent mixers: spans of many lengths over lines that hold noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.state.spans import StateSpans, plan_spans, single_rows

LENGTHS = [1, 70, 64, 3, 129, 1]
STARTS = [5, 0, 64, 0, 7, 0]
KEPT = [(1, 33, 9), (1, 64, 10), (4, 128, 11), (2, 64, 12)]
"""One in the middle of a piece, one at its end, one at the end of a span."""
N_LINES = 14


@dataclasses.dataclass(frozen=True)
class ScanCase:
    """The arguments of a function before state and spans, what follows, and the state."""

    before: tuple[torch.Tensor | None, ...]
    state: torch.Tensor
    spans: StateSpans
    after: tuple[object, ...] = ()

    def run(self, function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """What it returns, and the state that it leaves."""
        state = self.state.clone()
        return function(*self.before, state, self.spans, *self.after), state

    def to(self, dtype: torch.dtype, states: torch.dtype, device: str = "cpu") -> ScanCase:
        before = tuple(None if one is None else one.to(device, dtype) for one in self.before)
        return dataclasses.replace(
            self, before=before, state=self.state.to(device, states), spans=moved(self.spans, device)
        )


def moved(spans: StateSpans, device: str) -> StateSpans:
    fields = {one.name: getattr(spans, one.name) for one in dataclasses.fields(spans)}
    return StateSpans(**{name: None if value is None else value.to(device) for name, value in fields.items()})


def spans_of(single: bool) -> tuple[StateSpans, int]:
    """Spans, and the number of their rows."""
    if single:
        return single_rows(torch.tensor([3, 0, 5, 7]), torch.tensor([4, 0, 9, 1])), 4
    indptr = np.array([0, *np.cumsum(LENGTHS)], np.int32)
    arrays = plan_spans(indptr, np.array([3, 0, 5, 1, 7, 2]), np.array(STARTS), KEPT)
    return StateSpans(*map(torch.from_numpy, arrays)), int(indptr[-1])


def conv_case(*, single: bool, columns: int = 24, k: int = 4, silu: bool = True, bias: bool = True) -> ScanCase:
    spans, n = spans_of(single)
    wide = torch.randn(n, columns + 3, dtype=torch.float64)
    weight = torch.randn(columns, k, dtype=torch.float64)
    added = torch.randn(columns, dtype=torch.float64) if bias else None
    state = torch.randn(N_LINES, k - 1, columns, dtype=torch.float64)
    return ScanCase((wide[:, 3:], weight, added), state, spans, (silu,))


def ssm_case(*, single: bool, heads: int = 4, groups: int = 2, p: int = 16, s: int = 32) -> ScanCase:
    spans, n = spans_of(single)
    rows = torch.randn(n, heads * p + 2 * groups * s, dtype=torch.float64)
    x, b, c = rows.split([heads * p, groups * s, groups * s], dim=1)
    x, b, c = x.unflatten(1, (heads, p)), b.unflatten(1, (groups, s)), c.unflatten(1, (groups, s))
    dt, a_log, d, dt_bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((n, heads), *[(heads,)] * 3))
    state = torch.randn(N_LINES, heads, p, s, dtype=torch.float64)
    return ScanCase((x, dt, b, c, a_log, d, dt_bias), state, spans, ((0.001, 2.0),))


def delta_case(*, single: bool, key_heads: int = 2, heads: int = 4, d: int = 16, e: int = 32) -> ScanCase:
    spans, n = spans_of(single)
    rows = torch.randn(n, 2 * key_heads * d + heads * e, dtype=torch.float64)
    q, k, v = rows.split([key_heads * d, key_heads * d, heads * e], dim=1)
    q, k, v = q.unflatten(1, (key_heads, d)), k.unflatten(1, (key_heads, d)), v.unflatten(1, (heads, e))
    a, b = (torch.randn(n, heads, dtype=torch.float64) for _ in range(2))
    a_log, dt_bias = (torch.randn(heads, dtype=torch.float64) for _ in range(2))
    state = torch.randn(N_LINES, heads, d, e, dtype=torch.float64)
    return ScanCase((q, k, v, a, b, a_log, dt_bias), state, spans)


CASES = {"convolve": conv_case, "scan_ssm": ssm_case, "scan_delta": delta_case}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((got.double() - expected).abs().max() / (1 + expected.abs().max()))
