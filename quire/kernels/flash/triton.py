"""Dense attention on CUDA: block sizes and launches of triton_kernels.py.

Block sizes fit a Hopper SM: accumulators in the registers of four or eight warps, tiles of two or three steps of the
loop in 227 KB of shared memory; among those that fit, the fastest on an H200. float32 runs on the plain units (no
TF32), in smaller blocks.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
import triton

from quire.kernels import jit
from quire.kernels.attention.triton import hooks as triton_hooks
from quire.kernels.attention.variant import Variant, expression
from quire.kernels.flash import triton_kernels as kernels
from quire.kernels.flash.op import Ragged

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

BLOCKING = {
    "forward": {64: (128, 64, 8, 3), 128: (128, 128, 8, 3), 256: (128, 64, 8, 2)},
    "backward_keys": {64: (64, 64, 4, 2), 128: (64, 128, 8, 2), 256: (32, 64, 8, 2)},
    "backward_queries": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 1)},
}
"""Kernel → largest (padded) head_dim → rows, keys, warps, stages; 16-bit inputs."""
TENSOR_HOOK_BLOCKING = {("forward", 128): (128, 128, 8, 2)}
"""The exceptions for hooks that read tensors: what they read passes through shared memory too."""
FLOAT32_BLOCKING = {64: (32, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 32, 4, 1)}
DELTA_ROWS = 64


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, ragged: Ragged | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. lse: float32 [batch, n_q_heads, rows]."""
    launch = _Launch(q, k, v, variant, ragged)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    launch.run(kernels.forward, q.shape[2], lse, *launch.strides(lse)[:2], out, *launch.strides(out)[:2])
    return out, lse


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    variant: Variant,
    ragged: Ragged | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; d_lse like lse."""
    launch = _Launch(q, k, v, variant, ragged)
    deltas = launch.deltas(out, d_out, None if d_lse is None else d_lse.contiguous(), lse)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    given = (lse, *launch.strides(lse)[:2], deltas, d_out, *launch.strides(d_out))
    hooks = {"SLOPE": slope(variant)}
    launch.run(kernels.backward_keys, k.shape[2], *given, dk, dv, *launch.strides(dk)[:2], **hooks)
    launch.run(kernels.backward_queries, q.shape[2], *given, dq, *launch.strides(dq)[:2], **hooks)
    return dq, dk, dv


class _Launch:
    """What the launches of one call share."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, ragged: Ragged | None
    ) -> None:
        if q.dtype not in DTYPES or q.shape[3] > 256:
            raise ValueError(f"q {tuple(q.shape)} {q.dtype}: on cuda use bfloat16, float16 or float32, head_dim <= 256")
        self._ragged = ragged
        self._q = q
        self._n_seqs, self._q_len, self._kv_len = q.shape[0], q.shape[1], k.shape[1]
        if ragged is not None:
            self._n_seqs = len(ragged.q_bounds) - 1
            self._q_len, self._kv_len = (int((b[1:] - b[:-1]).max()) for b in (ragged.q_bounds, ragged.kv_bounds))
        self._indptrs = (q, q) if ragged is None else (ragged.q_indptr, ragged.kv_indptr)
        inputs = [part for x in (q, k, v) for part in (x, *self.strides(x))]
        hooks = triton_hooks.of(variant)
        self._inputs = (*inputs, *self._indptrs)
        self._numbers = (variant.scale, variant.window, variant.n_first, hooks.params)
        self._hooks_read_tensors = bool(variant.tensors)
        self._constants: dict[str, Any] = {
            "GROUP": q.shape[2] // k.shape[2], "RAGGED": ragged is not None, "CAUSAL": variant.causal,
            "WINDOWED": variant.window > 0, "LOGITS": hooks.functions["LOGITS"], "MASK": hooks.functions["MASK"],
            "D": q.shape[3], "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
        }  # fmt: skip

    def strides(self, x: torch.Tensor) -> tuple[int, int, int]:
        """Of sequence, and the two dimensions after it."""
        return (x.stride(0) if self._ragged is None else 0), x.stride(1), x.stride(2)

    def run(self, kernel: Any, n_heads: int, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel over the blocks (of keys for backward_keys, else of rows) of all sequences and heads."""
        rows, keys, warps, stages = blocking(
            kernel.__name__, self._constants["BLOCK_D"], self._q.dtype, self._hooks_read_tensors
        )
        of_keys = kernel is kernels.backward_keys
        n_blocks = triton.cdiv(self._kv_len, keys) if of_keys else triton.cdiv(self._q_len, rows)
        grid = n_blocks * n_heads * self._n_seqs
        if grid:
            kernel[(grid,)](
                *self._inputs, *arguments, self._q_len, self._kv_len, n_blocks, n_heads, *self._numbers,
                **self._constants, **constants, BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages,
            )  # fmt: skip

    def deltas(
        self, out: torch.Tensor, d_out: torch.Tensor, d_lse: torch.Tensor | None, lse: torch.Tensor
    ) -> torch.Tensor:
        """rowsum(out * d_out) - d_lse, float32, like lse."""
        result = torch.empty_like(lse)
        n_heads, n_blocks = out.shape[2], triton.cdiv(self._q_len, DELTA_ROWS)
        if n_blocks * n_heads * self._n_seqs:
            kernels.delta[(n_blocks * n_heads * self._n_seqs,)](
                out, *self.strides(out)[:2], d_out, *self.strides(d_out), result if d_lse is None else d_lse,
                *self.strides(lse)[:2], result, self._indptrs[0], self._q_len, n_blocks, n_heads,
                RAGGED=self._ragged is not None, HAS_D_LSE=d_lse is not None, D=self._constants["D"],
                BLOCK_D=self._constants["BLOCK_D"], BLOCK_M=DELTA_ROWS, num_warps=4,
            )  # fmt: skip
        return result


def blocking(kernel: str, block_d: int, dtype: torch.dtype, hooks_read_tensors: bool) -> tuple[int, int, int, int]:
    """Rows, keys, warps and pipeline stages of a kernel."""
    width = max(64, block_d)
    if dtype == torch.float32:
        return FLOAT32_BLOCKING[width]
    exception = TENSOR_HOOK_BLOCKING.get((kernel, width)) if hooks_read_tensors else None
    return exception or BLOCKING[kernel][width]


_SLOPES: weakref.WeakKeyDictionary[Variant, Any] = weakref.WeakKeyDictionary()


def slope(variant: Variant) -> Any:
    """The derivative of logits_transform as a hook's function; None for 1."""
    if variant not in _SLOPES:
        program, slope = variant.program, None
        if "logits_transform" in program.hooks:
            derivative = expression.derivative(program.hooks["logits_transform"])
            if derivative.text() != expression.constant(1.0).text():
                alone = dataclasses.replace(program, hooks={"logits_transform": derivative})
                slope = jit.generated_module("flash_slope", triton_hooks.source(alone)).logits_transform
        _SLOPES[variant] = slope
    return _SLOPES[variant]
