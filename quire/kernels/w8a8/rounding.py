"""Rows of x in e4m3 for the Hopper kernels, by a dependent launch (csrc/cuda/rows.cu).

While it runs the product after it reads weights already. Owns its arguments. Does not own the kernel, nor that of
Triton, which rounds what lies otherwise. Invariant: the codes are those of Triton's kernel, bit for bit.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import hopper_rows
from quire.kernels.w8a8 import triton
from quire.kernels.w8a8.reference import BLOCK
from quire.kernels.w8a8.triton import Rounded

MAX_SIZE = 16384
"""Elements of a row with one scale that the threads of a block can hold."""


class _Args(ctypes.Structure):
    """QuireRoundArgs in csrc/cuda/rows.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "codes", "scales")],
        *[(name, ctypes.c_int64) for name in ("x_row", "codes_row")],
        *[(name, ctypes.c_int32) for name in ("n_rows", "k", "scales_row", "blocks", "given")],
    ]


def round_rows(x: torch.Tensor, blocks: bool, scale: torch.Tensor | None, *, room: int) -> Rounded:
    """As `triton.round_rows` to e4m3, for at least one row and k a multiple of 128."""
    m, k = x.shape
    fits = (blocks or k <= MAX_SIZE) and x.stride(0) % hopper_rows.WIDTH == 0 and hopper_rows.aligned(x)
    if not fits or hopper_rows.obstacle(x.dtype):
        return triton.round_rows(x, torch.float8_e4m3fn, blocks, scale, room=room)
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    rows = -(-m // room) * room
    if scale is None:
        scales = torch.empty((k // BLOCK, rows) if blocks else (rows,), dtype=torch.float32, device=x.device)
    else:
        scales = scale
    args = _Args(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), x.stride(0), k, m, k, rows, blocks, scale is not None
    )
    hopper_rows.launch("quire_round", x, args)
    return Rounded(codes, scales)
