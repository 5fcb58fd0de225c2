"""Calls the recurrent kernels on the current stream. Nothing is read from the device, so that steps can be captured."""

from __future__ import annotations

import torch
import triton

from quire.config.delta import N_SCALES, N_TRIANGLES
from quire.config.states import PIECE
from quire.kernels.state.spans import StateSpans, rows_of
from quire.kernels.state.triton import conv, delta, ssm
from quire.kernels.state.triton import gate as gated

CONV_COLUMNS, PIECE_COLUMNS = 128, 64
WIDE_STATE = 128
LEAST = 16
"""Smallest side of a product of matrices."""
STATE_NUMBERS = 4096
"""Of a one-row update's block."""
FEW_HEADS = 64
"""Of all rows of an update: then blocks of the delta rule are small, so that there are many."""
SOLVE_WARPS, SCAN_WARPS, SCAN_VALUES, SCAN_STAGES = {2: 2, 4: 8}, {2: 4, 4: 8}, {2: 64, 4: 32}, 3
"""Of the delta rule's pieces, by the bytes of an element: the fastest of 18 on an H200, and in float32 those that leave
least to memory."""


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    spans: StateSpans,
    silu: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    n, columns = x.shape
    out = torch.empty(n, columns, dtype=x.dtype, device=x.device) if out is None else out
    k, weight = weight.shape[1], weight.contiguous()
    blocks = triton.cdiv(columns, CONV_COLUMNS)
    if spans.is_single:
        conv.convolve_rows[(n, blocks)](
            x, x.stride(0), weight, bias, state, out, spans.lines, spans.fresh, columns,
            K=k, SILU=silu, BLOCK=CONV_COLUMNS, num_warps=2,
        )  # fmt: skip
        return out
    of_spans = spans.lines, spans.fresh, spans.piece_ptr, spans.row_ptr
    assert spans.span_of is not None
    conv.convolve_pieces[(len(spans.span_of), triton.cdiv(columns, PIECE_COLUMNS))](
        x, x.stride(0), weight, bias, state, out, *of_spans, spans.span_of, columns,
        K=k, SILU=silu, L=PIECE, BLOCK=PIECE_COLUMNS, num_warps=8,
    )  # fmt: skip
    conv.keep_inputs[(len(spans.lines), blocks)](
        x, x.stride(0), state, *of_spans, spans.keep, columns, K=k, BLOCK=CONV_COLUMNS, num_warps=2
    )
    return out


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
    n, heads, p = x.shape
    size, per_group = b.shape[2], heads // b.shape[1]
    out = torch.empty(n, heads, p, dtype=x.dtype, device=x.device) if out is None else out
    x, b, c = (rows_of(one) for one in (x, b, c))
    inputs = x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0), a_log, d, dt_bias, state, out
    block_s = max(LEAST, triton.next_power_of_2(size))
    shape = {"H": heads, "P": p, "S": size, "PER_GROUP": per_group, "BLOCK_S": block_s}
    if spans.is_single:
        block_p = min(triton.next_power_of_2(p), max(1, STATE_NUMBERS // block_s))
        ssm.scan_rows[(n, heads, triton.cdiv(p, block_p))](
            *inputs, spans.lines, spans.fresh, *dt_limit, **shape, BLOCK_P=block_p, num_warps=4
        )
        return out
    # Tiles that leave nothing, or least, of what a program has to memory, as compiled for Hopper.
    block_p = max(LEAST, min(32 if block_s > WIDE_STATE else 64, triton.next_power_of_2(p)))
    ssm.scan_pieces[(len(spans.lines), heads, triton.cdiv(p, block_p))](
        *inputs, spans.lines, spans.fresh, spans.piece_ptr, spans.row_ptr, spans.keep, *dt_limit, **shape,
        L=PIECE, BLOCK_P=block_p, PRECISION=_precision(x), num_warps=8, num_stages=2,
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
    n, heads, e = v.shape
    size, per_key = k.shape[2], heads // k.shape[1]
    out = torch.empty(n, heads, e, dtype=v.dtype, device=v.device) if out is None else out
    q, k, v = (rows_of(one) for one in (q, k, v))
    a, b = (one if one.stride(1) == 1 else one.contiguous() for one in (a, b))
    scale, block_d = size**-0.5, max(LEAST, triton.next_power_of_2(size))
    shape = {"H": heads, "D": size, "E": e, "PER_KEY": per_key, "BLOCK_D": block_d}
    if spans.is_single:
        numbers, warps = (STATE_NUMBERS // 2, 2) if n * heads <= FEW_HEADS else (STATE_NUMBERS * 2, 4)
        block_e = min(triton.next_power_of_2(e), max(1, numbers // block_d))
        delta.scan_rows[(n, heads, triton.cdiv(e, block_e))](
            q, q.stride(0), k, k.stride(0), v, v.stride(0), a, a.stride(0), b, b.stride(0), a_log, dt_bias, state, out,
            spans.lines, spans.fresh, scale, **shape, BLOCK_E=block_e, num_warps=warps,
        )  # fmt: skip
        return out
    _scan_delta_pieces(q, k, v, (a, b, a_log, dt_bias), state, spans, out)
    return out


def _scan_delta_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    spans: StateSpans,
    out: torch.Tensor,
) -> None:
    """Of spans of many rows; gates: a, b, a_log, dt_bias."""
    assert spans.span_of is not None
    (heads, e), (key_heads, size) = v.shape[1:], k.shape[1:]
    a, b, a_log, dt_bias = gates
    block_d = max(LEAST, triton.next_power_of_2(size))
    shape = {"H": heads, "D": size, "PER_KEY": heads // key_heads, "L": PIECE, "BLOCK_D": block_d}
    precision, item = _precision(k), min(k.element_size(), 4)
    tiles = len(spans.span_of), heads
    solved, seen = (torch.empty(*tiles, PIECE, PIECE, dtype=k.dtype, device=k.device) for _ in range(N_TRIANGLES))
    scales = torch.empty(*tiles, N_SCALES, PIECE, dtype=torch.float32, device=k.device)
    delta.solve_pieces[tiles](
        q, q.stride(0), k, k.stride(0), a, a.stride(0), b, b.stride(0), a_log, dt_bias,
        solved, seen, scales, spans.row_ptr, size**-0.5,
        **shape, BLOCK=LEAST, PRECISION=precision, EXACT=precision, num_warps=SOLVE_WARPS[item],
        num_stages=1,
    )  # fmt: skip
    block_e = max(LEAST, min(triton.next_power_of_2(e), SCAN_VALUES[item]))
    delta.scan_pieces[(heads * triton.cdiv(e, block_e), len(spans.lines))](
        q, q.stride(0), k, k.stride(0), v, v.stride(0), solved, seen, scales, state, out,
        spans.lines, spans.fresh, spans.piece_ptr, spans.row_ptr, spans.keep,
        **shape, E=e, BLOCK_E=block_e, PRECISION=precision, STAGES=SCAN_STAGES, num_warps=SCAN_WARPS[item],
    )  # fmt: skip


def norm_gated(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, size: int, gate_first: bool
) -> torch.Tensor:
    """See op.py."""
    n, columns = y.shape
    out = torch.empty(n, columns, dtype=y.dtype, device=y.device)
    gated.norm_rows[(n, columns // size)](
        y, y.stride(0), gate, gate.stride(0), weight, out, columns, len(weight), eps,
        SIZE=size, GATE_FIRST=gate_first, BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4 if size > 512 else 1,
    )  # fmt: skip
    return out


def _precision(x: torch.Tensor) -> str:
    """float32 inputs are for tests, and multiplied as such."""
    return "ieee" if x.dtype is torch.float32 else "tf32"
