"""The gated delta rule in CUDA C++ for Hopper: one row of each span (csrc/cuda/state_rows.cu), and prompts in pieces
(state_solve.cu, then state_scan.cu).

Owns what the kernels take, their build and launch. Nothing is read from the device, so a step can be captured.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
from typing import Final

import torch

from quire.config.delta import N_SCALES, N_TRIANGLES
from quire.config.states import PIECE
from quire.kernels.catalog import Slower
from quire.kernels.hopper import build_obstacle, load_variant
from quire.kernels.hopper_rows import WIDTH, aligned
from quire.kernels.state.spans import StateSpans

DTYPES = (torch.bfloat16, torch.float16)
KEY_DIM, COLUMNS, MAX_GRID = 128, 32, 65535
"""Of keys; values of a block; spans, and pieces, of a launch."""
LEAST_HEADS, MANY_HEADS = 128, 256
"""Of all rows of an update: with fewer, Triton's blocks are done sooner; with many, blocks of 64 values are best."""
FULL: Final = 132
"""From so many blocks of 64 values on prompts have those, not blocks of 32: the multiprocessors of an H200."""
FUNCTIONS = {"state_rows.cu": "quire_delta_rows", "state_solve.cu": "quire_solve", "state_scan.cu": "quire_scan"}


class _RowsArgs(ctypes.Structure):
    """QuireDeltaRowsArgs in csrc/cuda/state_rows.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "a", "b", "a_log", "dt_bias", "state", "out")],
        *[(name, ctypes.c_void_p) for name in ("lines", "fresh")],
        *[(name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row", "a_row", "b_row")],
        *[(name, ctypes.c_int32) for name in ("n_rows", "heads", "e", "per_key", "lanes")],
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class _SolveArgs(ctypes.Structure):
    """QuireSolveArgs in csrc/cuda/state_solve.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "a", "b", "a_log", "dt_bias", "solved", "seen", "scales")],
        ("row_ptr", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("q_row", "k_row", "a_row", "b_row")],
        *[(name, ctypes.c_int32) for name in ("n_pieces", "key_heads", "per_key")],
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class _ScanArgs(ctypes.Structure):
    """QuireScanArgs in csrc/cuda/state_scan.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "solved", "seen", "scales", "state", "out")],
        *[(name, ctypes.c_void_p) for name in ("lines", "fresh", "piece_ptr", "row_ptr", "keep")],
        *[(name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row")],
        *[(name, ctypes.c_int32) for name in ("n_spans", "heads", "e", "per_key", "chains")],
    ]  # fmt: skip


def obstacle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    spans: StateSpans,
) -> str | None:
    """Why these kernels do not run on such rows, or None. May compile them (seconds)."""
    if q.dtype not in DTYPES or a_log.dtype is not torch.float32 or dt_bias.dtype is not torch.float32:
        return f"rows are {q.dtype} and decays {a_log.dtype}: they must be bfloat16 or float16, and float32"
    others = {one.dtype for one in (k, v, a, b)} - {q.dtype}
    if others or state.dtype is not torch.float32:
        kinds = ", ".join(str(one) for one in others) or q.dtype
        return f"beside rows of {q.dtype} some are {kinds}, and states {state.dtype}: must be the same, and float32"
    if k.shape[2] != KEY_DIM or v.shape[2] % COLUMNS:
        return f"keys have {k.shape[2]} dimensions and values {v.shape[2]}: must be {KEY_DIM}, and whole {COLUMNS}s"
    if spans.is_single and v.shape[0] * v.shape[1] < LEAST_HEADS:
        return Slower(f"{v.shape[0] * v.shape[1]} heads of all rows: Triton's update is as fast below {LEAST_HEADS}")
    n_blocks = max(len(spans.lines), 0 if spans.span_of is None else len(spans.span_of))
    if n_blocks > MAX_GRID:
        return f"{n_blocks} spans or pieces: at most {MAX_GRID}"
    in_rows = all(x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % WIDTH == 0 for x in (q, k, v))
    if not in_rows or a.stride(1) != 1 or b.stride(1) != 1 or not aligned(q, k, v, state):
        return "rows of keys or values do not begin at multiples of 16 bytes"
    return _machine_obstacle(q.dtype)


@functools.cache
def _machine_obstacle(dtype: torch.dtype) -> str | None:
    return build_obstacle(lambda: _library(dtype))


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
    key_heads, size = k.shape[1:]
    out = torch.empty(n, heads, e, dtype=v.dtype, device=v.device) if out is None else out
    sizes = heads, e, heads // key_heads
    if spans.is_single:
        rows = q, k, v, a, b
        pointers = _pointers(*rows, a_log, dt_bias, state, out, spans.lines, spans.fresh)
        launch(
            "quire_delta_rows", _RowsArgs(*pointers, *_strides(*rows), n, *sizes, _lanes(n * heads, e), size**-0.5), q
        )
        return out
    assert spans.span_of is not None and spans.row_ptr is not None
    tiles = len(spans.span_of), heads
    solved, seen = (torch.empty(*tiles, PIECE, PIECE, dtype=k.dtype, device=k.device) for _ in range(N_TRIANGLES))
    scales = torch.empty(*tiles, N_SCALES, PIECE, dtype=torch.float32, device=k.device)
    pointers = _pointers(q, k, a, b, a_log, dt_bias, solved, seen, scales, spans.row_ptr)
    solve = _SolveArgs(*pointers, *_strides(q, k, a, b), tiles[0], key_heads, heads // key_heads, size**-0.5)
    launch("quire_solve", solve, q)
    assert spans.piece_ptr is not None and spans.keep is not None
    of_spans = spans.lines, spans.fresh, spans.piece_ptr, spans.row_ptr, spans.keep
    pointers = _pointers(q, k, v, solved, seen, scales, state, out, *of_spans)
    is_full = e % (2 * COLUMNS) == 0 and len(spans.lines) * heads * (e // (2 * COLUMNS)) >= FULL
    launch("quire_scan", _ScanArgs(*pointers, *_strides(q, k, v), len(spans.lines), *sizes, 4 if is_full else 2), q)
    return out


def _lanes(n_heads: int, e: int) -> int:
    """Of four values each, side by side in a block of an update. n_heads: of all rows."""
    return 16 if n_heads >= MANY_HEADS and e % 64 == 0 else 8


def _pointers(*tensors: torch.Tensor) -> list[int]:
    return [one.data_ptr() for one in tensors]


def _strides(*rows: torch.Tensor) -> list[int]:
    """Elements from one row to the next."""
    return [one.stride(0) for one in rows]


def launch(name: str, args: ctypes.Structure, q: torch.Tensor) -> None:
    """Run one of `FUNCTIONS` on the current stream of q's device, in the library of q's type."""
    stream = torch.cuda.current_stream(q.device).cuda_stream
    code = _library(q.dtype)[name](ctypes.byref(args), stream)
    if code:
        raise RuntimeError(f"{name} for {tuple(q.shape)} could not be launched: CUDA error {code}")


@functools.cache
def _library(dtype: torch.dtype) -> dict[str, ctypes._NamedFuncPointer]:
    """`FUNCTIONS`, compiled side by side if they are new. Raises BuildError."""
    flags = (f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}",)
    with concurrent.futures.ThreadPoolExecutor(len(FUNCTIONS)) as pool:
        libraries = list(pool.map(lambda source: load_variant(source, flags), FUNCTIONS))
    found = {}
    for name, library in zip(FUNCTIONS.values(), libraries, strict=True):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
        found[name] = function
    return found
