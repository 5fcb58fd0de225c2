"""What queries ask of lines, and values of what is seen, on CPU in the native library: where rows are to be alone."""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.catalog import unless_alone
from quire.kernels.mla.cpu import store

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class NativeHeads(ctypes.Structure):
    """QuireHeads in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "matrices", "out")),
        *((name, _L) for name in ("n", "n_heads", "k", "m", "x_row", "x_head", "matrix_row", "matrix_head")),
        *((name, _L) for name in ("out_row", "out_head")),
        *((name, _I) for name in ("dtype", "transposed", "n_threads")),
    )


def obstacle(*_: object) -> str | None:
    """Why this is not for such rows, or None."""
    return unless_alone()


def ask(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    plain, rank = keys.shape[1:]
    asked = q.new_empty(*q.shape[:2], lines.shape[1])
    _multiply(q[:, :, :plain], keys, asked[:, :, :rank], transposed=False)
    store(lines, norm, eps, q[:, :, plain:], asked[:, :, rank:], positions, cos_sin, pages, cache_locs)
    return asked


def values(seen: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    y = seen.new_empty(*seen.shape[:2], matrices.shape[1])
    _multiply(seen, matrices, y, transposed=True)
    return y


def _multiply(x: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor, *, transposed: bool) -> None:
    """out [n, n_heads, m] = x [n, n_heads, k] times the matrix of each head, [k, m] or, transposed, [m, k]."""
    if x.stride(2) != 1:
        x = x.contiguous()
    call = NativeHeads(
        x.data_ptr(), matrices.data_ptr(), out.data_ptr(), *x.shape, out.shape[2], x.stride(0), x.stride(1),
        matrices.stride(1), matrices.stride(0), out.stride(0), out.stride(1), native.DTYPES[x.dtype], transposed,
        torch.get_num_threads(),
    )  # fmt: skip
    native.required().quire_heads(ctypes.byref(call))
