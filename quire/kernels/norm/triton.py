"""Norms on CUDA: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See op.py."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    _launch(x, x.stride(0), head_stride, n_heads, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. The sum replaces `residual`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x.stride(0), 0, 1, residual, weight, out, eps)
    return out, residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See op.py."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, h = out.numel() // max(1, out.shape[-1]), out.shape[-1]
    if n_rows == 0:
        return out
    n_heads, head_stride = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    n_tables = max((len(table) for table in (weight, bias) if table is not None and table.dim() == 2), default=1)
    block = triton.next_power_of_2(h)
    _layer_norm[(n_rows,)](
        x, x.stride(0), head_stride, n_heads, x if weight is None else weight, x if bias is None else bias, n_tables,
        out, h, eps, WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


def _launch(
    x: torch.Tensor,
    row_stride: int,
    head_stride: int,
    n_heads: int,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    n_rows, h = out.numel() // max(1, out.shape[-1]), out.shape[-1]
    if n_rows == 0:
        return
    block = triton.next_power_of_2(h)
    _norm[(n_rows,)](
        x, row_stride, head_stride, n_heads, residual if residual is not None else x,
        residual.stride(0) if residual is not None else 0, weight, out, h, eps,
        ADD=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["eps"])  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, row_stride, head_stride, n_heads, residual, residual_stride, weight, out, h, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < h
    dtype = out.dtype.element_ty
    v = tl.load(x + i // n_heads * row_stride + i % n_heads * head_stride + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(residual + i * residual_stride + at, mask=live, other=0.0).to(tl.float32)
        total = (v + added).to(dtype)
        tl.store(residual + i * residual_stride + at, total, mask=live)
        v = total.to(tl.float32)
    normed = (v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / h + eps))).to(dtype)
    factor = tl.load(weight + at, mask=live, other=0.0)
    tl.store(out + i * h + at, (normed.to(tl.float32) * factor.to(tl.float32)).to(dtype), mask=live)


@triton.jit(do_not_specialize=["eps"])  # type: ignore[untyped-decorator]
def _layer_norm(  # type: ignore[no-untyped-def]
    x, row_stride, head_stride, n_heads, weight, bias, n_tables, out, h, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < h
    v = tl.load(x + i // n_heads * row_stride + i % n_heads * head_stride + at, mask=live, other=0.0).to(tl.float32)
    centred = tl.where(live, v - tl.sum(v, 0) / h, 0.0)
    normed = centred * (1.0 / tl.sqrt(tl.sum(centred * centred, 0) / h + eps))
    table = i % n_tables * h
    if WEIGHT:
        normed *= tl.load(weight + table + at, mask=live, other=0.0).to(tl.float32)
    if BIAS:
        normed += tl.load(bias + table + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + i * h + at, normed.to(out.dtype.element_ty), mask=live)
