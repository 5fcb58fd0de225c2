"""Recurrences on CPU: pieces of prompts by products of matrices, single rows of many sequences together.

The algebra of a piece is that of the papers: the dual form of Mamba-2 (Dao and Gu 2024, section 6) and the WY form of
the delta rule (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", section 3.2, with the decay
of "Gated Delta Networks", section 3.3). Arithmetic in the states' type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire.kernels.state.reference import norm_gated, unit
from quire.kernels.state.spans import NOWHERE, StateSpans

__all__ = ["convolve", "norm_gated", "scan_delta", "scan_ssm"]


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
    taps, k = weight.to(wide).t().contiguous(), weight.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    if spans.is_single:
        lines = spans.lines.long()
        seen = torch.cat((_begun(state[lines], spans), x[:, None]), dim=1)
        y = (seen.to(wide) * taps).sum(1)
        out.copy_(_acted(y, bias, silu))
        state[lines] = seen[:, 1:]
        return out
    for line, fresh, pieces in _pieces(spans):
        first, end = pieces[0][0], pieces[-1][1]
        past = torch.zeros_like(state[line]) if fresh else state[line]
        seen = torch.cat((past, x[first:end]))
        wide_seen, n = seen.to(wide), end - first
        y = sum((wide_seen[j : j + n] * taps[j] for j in range(1, k)), wide_seen[:n] * taps[0])
        out[first:end] = _acted(y, bias, silu)
        for _, stop, keep in pieces:
            if keep != NOWHERE:
                state[keep] = seen[stop - first : stop - first + k - 1]
        state[line] = seen[n:]
    return out


def _acted(y: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    y = y if bias is None else y + bias.to(y.dtype)
    return F.silu(y) if silu else y


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
    kind, per_group = state.dtype, x.shape[1] // b.shape[1]
    step = F.softplus(dt.to(kind) + dt_bias.to(kind)).clamp(*dt_limit)
    decay = step * -a_log.to(kind).exp()
    x_wide, b, c = x.to(kind), b.to(kind), c.to(kind)
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    skipped = x_wide * d.to(kind)[:, None]
    if spans.is_single:
        lines = spans.lines.long()
        b_heads, c_heads = (one.repeat_interleave(per_group, 1) for one in (b, c))
        h = _begun(state[lines], spans).mul_(decay.exp()[:, :, None, None])
        h += (x_wide * step[:, :, None])[:, :, :, None] * b_heads[:, :, None]
        state[lines] = h
        return out.copy_(skipped.add_((h @ c_heads[:, :, :, None]).squeeze(-1)))
    for line, fresh, pieces in _pieces(spans):
        h = torch.zeros_like(state[line]) if fresh else state[line].clone()
        for first, end, keep in pieces:
            rows = slice(first, end)
            total = decay[rows].cumsum(0).t()  # [heads, rows]
            b_heads, c_heads = (one[rows].transpose(0, 1).repeat_interleave(per_group, 0) for one in (b, c))
            moved = (x_wide[rows] * step[rows, :, None]).transpose(0, 1)
            within = (c_heads @ b_heads.mT) * _falls(total)
            y = within @ moved + (c_heads * total.exp()[:, :, None]) @ h.mT
            out[rows] = skipped[rows] + y.transpose(0, 1)
            last = total[:, -1:]
            h = h * last.exp()[:, :, None] + (moved * (last - total).exp()[:, :, None]).mT @ b_heads
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
    kind, per_key = state.dtype, v.shape[1] // k.shape[1]
    q, k = (unit(one.to(kind)) for one in (q, k))
    q = q * q.shape[-1] ** -0.5
    decay = F.softplus(a.to(kind) + dt_bias.to(kind)) * -a_log.to(kind).exp()
    beta, v_wide = torch.sigmoid(b.to(kind)), v.to(kind)
    out = torch.empty(v.shape, dtype=v.dtype) if out is None else out
    if spans.is_single:
        lines = spans.lines.long()
        q_heads, k_heads = (one.repeat_interleave(per_key, 1) for one in (q, k))
        s = _begun(state[lines], spans).mul_(decay.exp()[:, :, None, None])
        error = (v_wide - (k_heads[:, :, None] @ s).squeeze(2)) * beta[:, :, None]
        s += k_heads[:, :, :, None] * error[:, :, None]
        state[lines] = s
        return out.copy_((q_heads[:, :, None] @ s).squeeze(2))
    for line, fresh, pieces in _pieces(spans):
        s = torch.zeros_like(state[line]) if fresh else state[line].clone()
        for first, end, keep in pieces:
            rows = slice(first, end)
            total = decay[rows].cumsum(0).t()  # [heads, rows]
            q_heads, k_heads = (one[rows].transpose(0, 1).repeat_interleave(per_key, 0) for one in (q, k))
            weight, falls, risen = beta[rows].t()[:, :, None], _falls(total), total.exp()[:, :, None]
            system = (k_heads * weight) @ k_heads.mT * falls
            wanted = torch.cat((v_wide[rows].transpose(0, 1) * weight, k_heads * weight * risen), dim=-1)
            solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
            new = solved[..., : v.shape[2]] - solved[..., v.shape[2] :] @ s
            y = (q_heads * risen) @ s + (q_heads @ k_heads.mT * falls) @ new
            out[rows] = y.transpose(0, 1)
            last = total[:, -1:]
            s = s * last.exp()[:, :, None] + (k_heads * (last - total).exp()[:, :, None]).mT @ new
            if keep != NOWHERE:
                state[keep] = s
        state[line] = s
    return out


def _falls(total: torch.Tensor) -> torch.Tensor:
    """total: [heads, rows], sums of logarithms of decays → what is left of row j at row i, 0 for j > i."""
    difference = total[:, :, None] - total[:, None]
    later = torch.ones(difference.shape[1:], dtype=torch.bool).triu(1)
    return difference.masked_fill_(later, -torch.inf).exp_()


def _begun(states: torch.Tensor, spans: StateSpans) -> torch.Tensor:
    """Copies of lines, zeros where a span is fresh."""
    fresh = spans.fresh.bool()
    return states.masked_fill_(fresh.view(-1, *[1] * (states.dim() - 1)), 0)


def _pieces(spans: StateSpans) -> list[tuple[int, bool, list[tuple[int, int, int]]]]:
    """(line, whether it is fresh, its pieces: first row, end, line to keep) of each span."""
    assert spans.piece_ptr is not None and spans.row_ptr is not None and spans.keep is not None
    piece_ptr, row_ptr, keep = spans.piece_ptr.tolist(), spans.row_ptr.tolist(), spans.keep.tolist()
    pieces = list(zip(row_ptr[:-1], row_ptr[1:], keep, strict=True))
    columns = zip(spans.lines.tolist(), spans.fresh.tolist(), piece_ptr[:-1], piece_ptr[1:], strict=True)
    return [(line, bool(fresh), pieces[first:end]) for line, fresh, first, end in columns]
