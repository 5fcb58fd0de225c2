"""Launches of the recurrences that go token after token: where rows are to be alone.

Owns block sizes and grids. Does not own the kernels (`tokens`), nor the convolution and the gated norm, whose rows are
alone in any case (`launcher`). A step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Final

import torch
import triton

from quire.kernels.catalog import unless_alone
from quire.kernels.state.spans import StateSpans, rows_of
from quire.kernels.state.triton import tokens

STATE_NUMBERS: Final = 1024
"""Of a program: with one warp sums over a state's rows wait for no other."""


def obstacle(*_: object) -> str | None:
    """Why this is not for such rows, or None."""
    return unless_alone()


def scan_ssm(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    spans: StateSpans,
    dt_limit: tuple[float, float],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    heads, p = x.shape[1:]
    size, per_group = b.shape[2], heads // b.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    x, b, c = (rows_of(one) for one in (x, b, c))
    block_s = triton.next_power_of_2(size)
    block_p = min(triton.next_power_of_2(p), max(1, STATE_NUMBERS // block_s))
    tokens.scan_ssm[(len(spans.lines), heads, triton.cdiv(p, block_p))](
        x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0), a_log, d, dt_bias, state, out,
        *_arrays(spans), *dt_limit, H=heads, P=p, S=size, PER_GROUP=per_group, BLOCK_P=block_p, BLOCK_S=block_s,
        num_warps=1,
    )  # fmt: skip
    return out


def scan_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    spans: StateSpans,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    heads, e = v.shape[1:]
    size, per_key = k.shape[2], heads // k.shape[1]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    q, k, v = (rows_of(one) for one in (q, k, v))
    a, b = (one if one.stride(1) == 1 else one.contiguous() for one in (a, b))
    block_d = triton.next_power_of_2(size)
    block_e = min(triton.next_power_of_2(e), max(1, STATE_NUMBERS // block_d))
    tokens.scan_delta[(len(spans.lines), heads, triton.cdiv(e, block_e))](
        q, q.stride(0), k, k.stride(0), v, v.stride(0), a, a.stride(0), b, b.stride(0), a_log, dt_bias, state, out,
        *_arrays(spans), size**-0.5, H=heads, D=size, E=e, PER_KEY=per_key, BLOCK_D=block_d, BLOCK_E=block_e,
        num_warps=1,
    )  # fmt: skip
    return out


def _arrays(spans: StateSpans) -> tuple[torch.Tensor | int, ...]:
    """What says which rows a span has, and whether each has one; then any numbers stand for the others."""
    if spans.piece_ptr is None or spans.row_ptr is None or spans.keep is None:
        return spans.lines, spans.fresh, spans.lines, spans.lines, spans.lines, 1
    return spans.lines, spans.fresh, spans.piece_ptr, spans.row_ptr, spans.keep, 0
