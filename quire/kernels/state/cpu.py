"""Recurrent mixers on CPU in the native library, token after token.

Owns the calls. Does not own the arithmetic (csrc/cpu/state.cpp). Invariant: what a row gives depends on its inputs and
on the state before it alone, so that chunks, pieces, snapshots and neighbours change no bit.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.act.elements import exp, sigmoid, softplus
from quire.kernels.state.reference import L2_EPS
from quire.kernels.state.spans import StateSpans, rows_of

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _structure(pointers: str, counts: str, floats: str, numbers: str) -> type[ctypes.Structure]:
    """In this order."""
    kinds = ((pointers, _P), (counts, _L), (floats, _F), (numbers, _I))
    fields = [(one, kind) for names, kind in kinds for one in names.split()]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


_Spans = _structure("lines fresh piece_ptr row_ptr keep", "n_spans", "", "")
_Convolve = _structure("spans x taps bias state out", "n_columns k x_row", "", "dtype silu n_threads")
_ScanSsm = _structure(
    "spans x b c steps decays skip state out", "n_heads n_groups p s x_row b_row c_row", "", "dtype n_threads"
)
_ScanDelta = _structure(
    "spans q k v decays betas state out", "n_key_heads n_heads d e q_row k_row v_row", "eps scale", "dtype n_threads"
)
_NormGated = _structure(
    "y gate weight out", "n n_columns size n_weights y_row gate_row", "eps", "dtype gate_first n_threads"
)


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
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    taps, added = weight.float().t().contiguous(), None if bias is None else bias.float()
    given, _held = _spans(spans)
    pointers = (x, taps, added, state, out)
    _call("quire_convolve", _Convolve(
        ctypes.addressof(given), *map(_address, pointers), x.shape[1], weight.shape[1], x.stride(0),
        native.DTYPES[x.dtype], silu, torch.get_num_threads(),
    ))  # fmt: skip
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
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    x, b, c = (rows_of(one) for one in (x, b, c))
    steps = softplus(dt.float() + dt_bias.float()).clamp_(*dt_limit)
    decays, skip = exp(steps * _rates(a_log)), d.float()
    given, _held = _spans(spans)
    pointers = (x, b, c, steps, decays, skip, state, out)
    heads, p = x.shape[1:]
    _call("quire_scan_ssm", _ScanSsm(
        ctypes.addressof(given), *map(_address, pointers), heads, b.shape[1], p, b.shape[2],
        x.stride(0), b.stride(0), c.stride(0), native.DTYPES[x.dtype], torch.get_num_threads(),
    ))  # fmt: skip
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
    out = torch.empty(v.shape, dtype=v.dtype) if out is None else out
    q, k, v = (rows_of(one) for one in (q, k, v))
    decays = exp(softplus(a.float() + dt_bias.float()) * _rates(a_log))
    betas = sigmoid(b.float())
    given, _held = _spans(spans)
    pointers = (q, k, v, decays, betas, state, out)
    (key_heads, d), (heads, e) = k.shape[1:], v.shape[1:]
    _call("quire_scan_delta", _ScanDelta(
        ctypes.addressof(given), *map(_address, pointers), key_heads, heads, d, e,
        q.stride(0), k.stride(0), v.stride(0), L2_EPS, d**-0.5, native.DTYPES[v.dtype], torch.get_num_threads(),
    ))  # fmt: skip
    return out


def norm_gated(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, size: int, gate_first: bool
) -> torch.Tensor:
    """See op.py."""
    out, table = torch.empty(y.shape, dtype=y.dtype), weight.float()
    _call("quire_norm_gated", _NormGated(
        *map(_address, (y, gate, table, out)), *y.shape, size, len(table), y.stride(0), gate.stride(0),
        eps, native.DTYPES[y.dtype], gate_first, torch.get_num_threads(),
    ))  # fmt: skip
    return out


def _rates(a_log: torch.Tensor) -> torch.Tensor:
    """Of each head, by itself: float32 [heads]."""
    return -exp(a_log.float()[None])[0]


def _spans(spans: StateSpans) -> tuple[ctypes.Structure, tuple[torch.Tensor | None, ...]]:
    """As C sees them, and what that points to."""
    arrays = spans.lines, spans.fresh, spans.piece_ptr, spans.row_ptr, spans.keep
    held = tuple(None if one is None else one.contiguous() for one in arrays)
    return _Spans(*map(_address, held), len(spans.lines)), held


def _call(name: str, arguments: ctypes.Structure) -> None:
    getattr(native.required(), name)(ctypes.byref(arguments))


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
