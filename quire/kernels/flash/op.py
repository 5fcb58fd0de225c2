"""Public dense attention with gradients. Checks what it is given and picks the implementation by device.

The autograd function saves q, k, v, out and lse, nothing else: memory is linear in the sequence length, and the
backward pass computes the probabilities again (Dao et al. 2022, algorithm 4).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from quire.kernels import selector, transfer
from quire.kernels.attention.variant import COORDINATES, Variant

INSTEAD = {
    "query_transform": "transform q in torch before the call",
    "key_transform": "transform k in torch before the call",
    "value_transform": "transform v in torch before the call",
    "output_transform": "transform the result in torch (return_lse=True gives the lse, with its gradient)",
}
"""Hook that is refused → what does the same; torch differentiates it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sequences of different lengths behind each other."""

    q_bounds: np.ndarray
    """int32 [n_seqs + 1], first row of each sequence's queries, on the host."""
    kv_bounds: np.ndarray
    q_indptr: torch.Tensor
    """The same on the device of q."""
    kv_indptr: torch.Tensor


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    q_indptr: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in memory linear in the sequence length, differentiable in q, k and v (Dao et al. 2022).

    q: [batch, q_len, n_q_heads, d]; k, v: [batch, kv_len, n_kv_heads, d], of one dtype; n_kv_heads divides n_q_heads
    (query head h reads head h // group). Any strides. Query i is at position i + kv_len - q_len, so that the last query
    sees all keys of a causal variant. Returns out like q; rows that see no key are zero and have no gradient.
    q_indptr, kv_indptr: sequences of different lengths instead of a batch: integers [n_seqs + 1] on the host, first row
    of each sequence, in q [n_rows, n_q_heads, d] and k, v [n_keys, n_kv_heads, d].
    return_lse: also the logsumexp of the visible logits, natural logarithm, float32 (float64 for float64),
    [batch, q_len, n_q_heads] or [n_rows, n_q_heads], -inf where nothing is seen; differentiable.
    variant: causal, window, n_first, logits_transform and logits_mask. site.q_row counts rows over the batch. Without
    one attention is causal with scale d ** -0.5.

    Raises ValueError for other hooks, softmax=False, parameters that require a gradient, and mismatches.
    """
    variant = variant or _causal(max(1, q.shape[-1:].numel()))
    _check_variant(variant, q.device)
    ragged = None
    if q_indptr is not None and kv_indptr is not None:
        _check_shapes(q, k, v, n_dims=3)
        bounds = (_bounds("q_indptr", q_indptr, q.shape[0]), _bounds("kv_indptr", kv_indptr, k.shape[0]))
        if len(bounds[0]) != len(bounds[1]):
            raise ValueError(f"q_indptr has {len(bounds[0])} entries and kv_indptr {len(bounds[1])}: make them equal")
        ragged = Ragged(*bounds, *(transfer.upload(one, q.device) for one in bounds))
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    elif q_indptr is not None or kv_indptr is not None:
        raise ValueError("q_indptr and kv_indptr come together: give both for ragged sequences, none for a batch")
    else:
        _check_shapes(q, k, v, n_dims=4)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = _Attention.apply(q, k, v, variant, ragged)  # type: ignore[no-untyped-call]
    lse = lse.transpose(1, 2)
    if ragged is not None:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


@functools.cache
def _causal(head_dim: int) -> Variant:
    return Variant(head_dim**-0.5)


class _Attention(torch.autograd.Function):
    """Implementations offer `forward` and `backward` on [batch, rows, heads, d]; with `ragged`, batch is 1."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        variant: Variant,
        ragged: Ragged | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = selector.select("flash", "forward", q)(q, k, v, variant, ragged)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.variant, ctx.ragged = variant, ragged
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[object, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        backward = selector.select("flash", "backward", q)
        return *backward(q, k, v, out, lse, d_out, d_lse, ctx.variant, ctx.ragged), None, None


def _check_variant(variant: Variant, device: torch.device) -> None:
    for hook in COORDINATES:
        if getattr(variant, hook) is not None and hook in INSTEAD:
            raise ValueError(f"flash_attention has no gradient for {hook}: {INSTEAD[hook]}")
    if variant.scale <= 0:
        raise ValueError(f"scale {variant.scale} must be positive: negate q for a negative one")
    if not variant.softmax:
        raise ValueError("flash_attention normalises with a softmax: a variant with softmax=False needs attention.run")
    for name, tensor in variant.tensors.items():
        if tensor.requires_grad:
            raise ValueError(f"parameter {name!r} requires a gradient, which only q, k and v get: detach() it")
        if tensor.device != device:
            raise ValueError(f"parameter {name!r} is on {tensor.device} and q on {device}: move it there")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_dims: int) -> None:
    shapes = f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}"
    if not q.dim() == k.dim() == n_dims or k.shape != v.shape:
        what = "[batch, length, heads, d]" if n_dims == 4 else "[rows, heads, d] with q_indptr and kv_indptr"
        raise ValueError(f"{shapes}: they must be {what}, and k like v")
    if q.shape[-1] != k.shape[-1] or q.shape[: n_dims - 3] != k.shape[: n_dims - 3]:
        raise ValueError(f"{shapes}: q and k differ in batch or head_dim")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{shapes}: {q.shape[-2]} query heads cannot share {k.shape[-2]} heads of keys evenly")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point or not q.device == k.device == v.device:
        raise ValueError(f"{shapes} on {q.device}, {k.device}, {v.device}: use one floating dtype and one device")


def _bounds(name: str, indptr: torch.Tensor, n_rows: int) -> np.ndarray:
    bounds = np.asarray(indptr, dtype=np.int32)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != n_rows or np.any(np.diff(bounds) < 0):
        raise ValueError(f"{name} {bounds.tolist()}: use ascending row numbers from 0 to {n_rows}")
    return bounds
