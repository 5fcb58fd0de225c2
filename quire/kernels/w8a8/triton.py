"""Linear layers of 8 bits on CUDA: one launch rounds the rows of x, one multiplies.

Owns these launches. Does not own the kernels (`triton_kernels`). Invariant: shapes alone decide what is launched.
"""

from __future__ import annotations

import dataclasses

import torch
import triton

from quire.kernels import around
from quire.kernels.invariance import are_rows_alone
from quire.kernels.norm import rms_norm
from quire.kernels.w8a8 import triton_kernels as kernels
from quire.kernels.w8a8.reference import BLOCK, LARGEST
from quire.kernels.w8a8.triton_tiles import tile

LEAST_FP8 = (8, 9)
"""The compute capability from which there are conversions to e4m3."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """Rows of x in 8 bits."""

    codes: torch.Tensor
    """[m, k], rows `codes.stride(0)` apart."""
    scales: torch.Tensor
    """float32: [groups, rows] where weights have blocks, [rows] or [1] else; rows: at least m."""


def obstacle(x: torch.Tensor, weight: torch.Tensor, *_: object) -> str | None:
    """Why this device cannot run it, or None."""
    if weight.dtype is torch.int8 or not x.is_cuda or torch.cuda.get_device_capability(x.device) >= LEAST_FP8:
        return None
    name = torch.cuda.get_device_name(x.device)
    return f"{name} has no conversion to e4m3: it needs compute capability {'.'.join(map(str, LEAST_FP8))}"


def round_rows(
    x: torch.Tensor, dtype: torch.dtype, blocks: bool, scale: torch.Tensor | None, *, room: int = 1
) -> Rounded:
    """x [m, k] in 8 bits by its rows, or with `blocks` by 128 columns of each; scale: [1], of all of x instead.

    room: rows of codes are a multiple of 16 bytes apart; of scales there is room for a multiple of so many rows.
    """
    m, k = x.shape
    codes = torch.empty(m, -(-k // 16) * 16, dtype=dtype, device=x.device)[:, :k]
    n_groups = triton.cdiv(k, BLOCK) if blocks else 1
    rows = triton.cdiv(m, room) * room
    scales = torch.empty(n_groups, rows, dtype=torch.float32, device=x.device) if scale is None else scale
    if m:
        grid = (m, triton.cdiv(k, 8 * BLOCK) if blocks else 1)
        kernels.round_blocks[grid](
            x, x.stride(0), codes, codes.stride(0), scales, rows, k, LARGEST=LARGEST[dtype], INT=dtype is torch.int8,
            GROUP=BLOCK, N_GROUPS=8, num_warps=4,
        ) if blocks else kernels.round_rows[grid](
            x, x.stride(0), codes, codes.stride(0), scales, k, LARGEST=LARGEST[dtype], INT=dtype is torch.int8,
            GIVEN=scale is not None, BLOCK=min(4096, triton.next_power_of_2(k)), num_warps=8,
        )  # fmt: skip
    return Rounded(codes, scales if blocks else scales.view(-1))


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: around.Norm | None,
    residual: torch.Tensor | None,
    silu_mul: bool,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See op.py."""
    if norm is not None:
        x = rms_norm(x, *norm)
    blocks = weight_scale.dim() == 2
    rounded = round_rows(x, weight.dtype, blocks, x_scale)
    m, (n, k) = x.shape[0], weight.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    bm, bn, bk = tile(m, n, are_rows_alone(), is_int=weight.dtype is torch.int8)
    if m:
        kernels.product[(triton.cdiv(m, bm) * triton.cdiv(n, bn),)](
            rounded.codes, rounded.codes.stride(0), rounded.scales, rounded.scales.shape[-1],
            weight, weight_scale, bias, y, m, n, K=k, X_STEP=0 if x_scale is not None else 1,
            W_STEP=0 if weight_scale.numel() == 1 else 1, BLOCKS=blocks, INT=weight.dtype is torch.int8,
            BM=bm, BN=bn, BK=bk, num_warps=8 if bm == 128 else 4, num_stages=4 if bm < 128 else 3,
        )  # fmt: skip
    return around.finish(y, residual, silu_mul, out)


linear_int8 = linear_fp8
