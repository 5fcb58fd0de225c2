"""Activations on CUDA: one program a block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    n, width = x.shape
    out = torch.empty(n, width // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        _silu_mul[(n, triton.cdiv(width // 2, BLOCK))](x, x.stride(0), out, width // 2, BLOCK=BLOCK, num_warps=4)
    return out


def activate(x: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """See op.py."""
    n, width = x.shape
    f = width // 2 if gated else width
    out = torch.empty(n, f, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (n, triton.cdiv(f, BLOCK))
        _activate[grid](x, x.stride(0), out, f, ACTIVATION=activation, GATED=gated, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]
    x, row_stride, out, f, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * row_stride + at, mask=at < f, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        acted = v * tl.sigmoid(v)
    elif ACTIVATION == "gelu":
        acted = 0.5 * v * (1.0 + tl.math.erf(v * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # tanh(a) = 2 sigmoid(2 a) - 1, so 0.5 (1 + tanh(a)) = sigmoid(2 a)
        acted = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    elif ACTIVATION == "relu":
        acted = tl.maximum(v, 0.0)
    else:
        acted = tl.maximum(v, 0.0) * tl.maximum(v, 0.0)
    dtype = out.dtype.element_ty
    rounded = acted.to(dtype)
    if GATED:
        up = tl.load(x + row * row_stride + f + at, mask=at < f, other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) * up).to(dtype)
    tl.store(out + row * f + at, rounded, mask=at < f)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(x, row_stride, out, f, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * row_stride + at, mask=at < f, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + f + at, mask=at < f, other=0.0).to(tl.float32)
    tl.store(out + row * f + at, swiglu(gate, up, out.dtype.element_ty), mask=at < f)


@triton.jit  # type: ignore[untyped-decorator]
def swiglu(gate, up, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of numbers in float32 that `dtype` has; for kernels that have made them themselves."""
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)
