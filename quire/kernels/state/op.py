"""Public recurrent mixers. Checks shapes and picks the implementation.

Each takes the rows of many spans in one flat batch; a span goes on from its line of the state and leaves there what is
behind its last row. Lines that two spans of a batch share are nobody's (padding).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels.selector import select
from quire.kernels.state.spans import StateSpans


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    spans: StateSpans,
    *,
    silu: bool,
) -> torch.Tensor:
    """A causal convolution of each column, then SiLU if asked: y_t = act(sum_j w_j x_(t-k+1+j) + bias).

    x: [n, c], rows contiguous; weight: [c, k]; bias: [c]; state: [n_lines, k - 1, c] of x's dtype, the last inputs of
    each line. Returns a new [n, c]. Raises ValueError for other shapes.
    """
    n_columns, k = weight.shape
    if x.dim() != 2 or x.shape[1] != n_columns or x.stride(1) != 1 or state.shape[1:] != (k - 1, n_columns):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and state {tuple(state.shape)} do not fit")
    run, out = select("state", "convolve", x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows, part in _parts(spans):
        run(x[rows], weight, bias, state, part, silu, out[rows])
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
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """The recurrence of Mamba-2 (Dao and Gu 2024): h = exp(t a) h + t x b^T, y = h c + d x, where a = -exp(a_log) and
    t = softplus(dt + dt_bias), cut to dt_limit.

    x: [n, heads, p]; dt: [n, heads]; b, c: [n, groups, s], each for heads / groups heads; a_log, d, dt_bias: [heads];
    state: [n_lines, heads, p, s], float32 or float64. Returns a new [n, heads, p] of x's dtype. Raises ValueError for
    other shapes.
    """
    n, heads, p = x.shape
    fits = b.shape == c.shape and heads % b.shape[1] == 0 and state.shape[1:] == (heads, p, b.shape[2])
    if not fits or dt.shape != (n, heads):
        raise ValueError(f"x {tuple(x.shape)}, b {tuple(b.shape)} and state {tuple(state.shape)} do not fit")
    run, out = select("state", "scan_ssm", x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows, part in _parts(spans):
        run(x[rows], dt[rows], b[rows], c[rows], a_log, d, dt_bias, state, part, dt_limit, out[rows])
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
) -> torch.Tensor:
    """The gated delta rule (Yang et al. 2024) of unit keys and queries: S = alpha S; S += beta k (v - S^T k)^T; y =
    S^T q / sqrt(d), where alpha = exp(-exp(a_log) softplus(a + dt_bias)) and beta = sigmoid(b).

    q, k: [n, key heads, d]; v: [n, heads, e], heads / key heads of them for each key head; a, b: [n, heads]; a_log,
    dt_bias: [heads]; state: [n_lines, heads, d, e], float32 or float64. Returns a new [n, heads, e] of v's dtype.
    Raises ValueError for other shapes.
    """
    heads, e = v.shape[1:]
    fits = q.shape == k.shape and heads % k.shape[1] == 0 and state.shape[1:] == (heads, k.shape[2], e)
    if not fits or a.shape != b.shape or a.shape != v.shape[:2]:
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)} and state {tuple(state.shape)} do not fit")
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for rows, part in _parts(spans):
        inputs = q[rows], k[rows], v[rows], a[rows], b[rows], a_log, dt_bias, state, part
        select("state", "scan_delta", *inputs)(*inputs, out[rows])
    return out


def norm_gated(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, size: int, gate_first: bool
) -> torch.Tensor:
    """RMS norm of each `size` columns, and SiLU of the gate: norm(y silu(gate)) where gate_first (Mamba-2), else
    norm(y) silu(gate) (gated DeltaNet).

    y, gate: [n, c], rows contiguous; weight: [c], or [size] for all groups of columns. Returns a new [n, c]. Raises
    ValueError for other shapes.
    """
    fits = y.dim() == 2 and y.shape == gate.shape and y.shape[1] % size == 0 and len(weight) in (size, y.shape[1])
    if not fits or y.stride(1) != 1 or gate.stride(1) != 1:
        raise ValueError(f"y {tuple(y.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit")
    out: torch.Tensor = select("state", "norm_gated", y)(y, gate, weight, eps, size, gate_first)
    return out


def _parts(spans: StateSpans) -> Iterator[tuple[slice, StateSpans]]:
    """Rows that decode, then those of prompts."""
    if spans.first is not None:
        yield slice(0, spans.n_first), spans.first
    yield slice(spans.n_first, None), spans
