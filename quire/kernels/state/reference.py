"""Recurrences in plain torch, token by token: the oracle. Arithmetic in float32, or in float64 for float64 inputs.

The convolution: y_t = sum_j w_j x_(t-k+1+j). Mamba-2 (Dao and Gu 2024, eq. 16): h_t = exp(dt_t a) h_(t-1) + dt_t x_t
b_t^T, y_t = h_t c_t + d x_t. The gated delta rule (Yang et al. 2024, "Gated Delta Networks", eq. 10):
S_t = S_(t-1) alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, y_t = S_t q_t; kept here transposed, [key, value].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from quire.kernels.state.spans import NOWHERE, StateSpans

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""dtype → largest |kernel - float64 reference| / (1 + |largest of the reference|); decays are
differences of sums of logarithms, which lose digits where these are large."""
L2_EPS = 1e-6


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
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).t()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for line, fresh, pieces in _spans(spans, len(x)):
        past = torch.zeros_like(state[line]) if fresh else state[line].clone()
        for first, end, keep in pieces:
            for row in range(first, end):
                seen = torch.cat((past, x[row : row + 1]))
                y = (seen.to(wide) * taps).sum(0)
                if bias is not None:
                    y = y + bias.to(wide)
                out[row] = F.silu(y) if silu else y
                past = seen[1:]
            if keep != NOWHERE:
                state[keep] = past
        state[line] = past
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
    wide = state.dtype
    step = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)
    a, per_group = -a_log.to(wide).exp(), x.shape[1] // b.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for line, fresh, pieces in _spans(spans, len(x)):
        h = torch.zeros_like(state[line]) if fresh else state[line].clone()
        for first, end, keep in pieces:
            for row in range(first, end):
                b_row, c_row = (one[row].to(wide).repeat_interleave(per_group, 0) for one in (b, c))
                x_row, dt_row = x[row].to(wide), step[row]
                h = h * (dt_row * a).exp()[:, None, None] + (dt_row[:, None] * x_row)[:, :, None] * b_row[:, None]
                out[row] = (h * c_row[:, None]).sum(-1) + d.to(wide)[:, None] * x_row
            if keep != NOWHERE:
                state[keep] = h
        state[line] = h
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
    wide, per_key = state.dtype, v.shape[1] // k.shape[1]
    q, k = (unit(one.to(wide)).repeat_interleave(per_key, 1) for one in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = (-a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))).exp()
    beta = torch.sigmoid(b.to(wide))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    for line, fresh, pieces in _spans(spans, len(v)):
        s = torch.zeros_like(state[line]) if fresh else state[line].clone()
        for first, end, keep in pieces:
            for row in range(first, end):
                s = s * decay[row][:, None, None]
                error = (v[row].to(wide) - (s * k[row][:, :, None]).sum(1)) * beta[row][:, None]
                s = s + k[row][:, :, None] * error[:, None]
                out[row] = (s * q[row][:, :, None]).sum(1)
            if keep != NOWHERE:
                state[keep] = s
        state[line] = s
    return out


def norm_gated(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, size: int, gate_first: bool
) -> torch.Tensor:
    """See op.py."""
    wide = torch.promote_types(y.dtype, torch.float32)
    acted = F.silu(gate.to(wide))
    x = y.to(wide) * acted if gate_first else y.to(wide)
    groups = x.unflatten(1, (-1, size))  # type: ignore[no-untyped-call]
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(1)
    scaled = normed * weight.to(wide).repeat(y.shape[1] // len(weight))
    found: torch.Tensor = scaled if gate_first else scaled * acted
    return found.to(y.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    """x over its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _spans(spans: StateSpans, n_rows: int) -> Iterator[tuple[int, bool, list[tuple[int, int, int]]]]:
    """(line, whether it is fresh, its pieces: first row, end, line to keep) of each span."""
    lines, fresh = spans.lines.tolist(), spans.fresh.tolist()
    if spans.piece_ptr is None or spans.row_ptr is None or spans.keep is None:
        for row in range(n_rows):
            yield lines[row], bool(fresh[row]), [(row, row + 1, NOWHERE)]
        return
    piece_ptr, row_ptr, keep = spans.piece_ptr.tolist(), spans.row_ptr.tolist(), spans.keep.tolist()
    for i, line in enumerate(lines):
        pieces = [(row_ptr[p], row_ptr[p + 1], keep[p]) for p in range(piece_ptr[i], piece_ptr[i + 1])]
        yield line, bool(fresh[i]), pieces
