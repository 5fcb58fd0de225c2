"""Rows of x in e4m3 for the Hopper kernels, normed before if asked, by a dependent launch (csrc/cuda/rows.cu).

While it runs the product after it reads weights already. Owns its arguments. Does not own the kernel, nor that of
Triton, which rounds what lies otherwise. Invariants: the codes are
those of Triton's kernel, bit for bit; with a norm, those of the result of `norm/hopper.py`.
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import hopper_rows
from quire.kernels.around import Norm
from quire.kernels.norm import rms_norm
from quire.kernels.w8a8 import triton
from quire.kernels.w8a8.reference import BLOCK
from quire.kernels.w8a8.triton import Rounded

MAX_SIZE = 16384
"""Elements of a row with one scale that the threads of a block can hold."""


class _Args(ctypes.Structure):
    """QuireRoundArgs in csrc/cuda/rows.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "codes", "scales", "norm_weight")],
        *[(name, ctypes.c_int64) for name in ("x_row", "codes_row")],
        *[(name, ctypes.c_int32) for name in ("n_rows", "k", "scales_row", "blocks", "given")],
        ("eps", ctypes.c_float),
    ]  # fmt: skip


def round_rows(
    x: torch.Tensor, blocks: bool, scale: torch.Tensor | None, *, room: int, norm: Norm | None = None
) -> Rounded:
    """As `triton.round_rows` to e4m3 of x or of its norm, for at least one row and k a multiple of 128."""
    m, k = x.shape
    weight, eps = (None, 0.0) if norm is None else norm
    fits = (k <= MAX_SIZE or (blocks and norm is None)) and hopper_rows.aligned(x, weight)
    fits = fits and (weight is None or weight.stride(0) == 1)
    if not fits or x.stride(0) % hopper_rows.WIDTH or hopper_rows.obstacle(x.dtype):
        x = x if norm is None else rms_norm(x, *norm)
        return triton.round_rows(x, torch.float8_e4m3fn, blocks, scale, room=room)
    codes = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=x.device)
    rows = -(-m // room) * room
    if scale is None:
        scales = torch.empty((k // BLOCK, rows) if blocks else (rows,), dtype=torch.float32, device=x.device)
    else:
        scales = scale
    args = _Args(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), None if weight is None else weight.data_ptr(),
        x.stride(0), k, m, k, rows, blocks, scale is not None, eps,
    )  # fmt: skip
    hopper_rows.launch("quire_round", x, args)
    return Rounded(codes, scales)
