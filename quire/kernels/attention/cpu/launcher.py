"""Attention on CPU: the native library for float32, bfloat16 and float16, with keys and values of that type
or in entries of 8 bits (kernels.kvstore.entry); hooks are compiled into one of their own.

Owns the call into C. Does not own the tiles (work.py) nor what a variant is compiled to (hooks.py).
"""

from __future__ import annotations

import ctypes

import torch

from quire.kernels import native
from quire.kernels.attention.cpu import hooks
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.variant import MAX_PARAMS, Variant

MAX_HEAD_DIM = 512
MAX_LINE_DIM = 1024
"""Limit where values are a part of keys. Sums of entries of 8 bits, which are integers, bound the other one."""


class _NativeArgs(ctypes.Structure):
    """QuireAttnArgs in csrc/cpu/quire_cpu.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("plan", "q", "k", "v", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_page", "k_head", "k_token")),
        *((name, ctypes.c_int64) for name in ("v_page", "v_head", "v_token")),
        *((name, ctypes.c_int32) for name in ("dtype", "int8_keys", "causal", "window", "n_first", "n_threads")),
        ("scale", ctypes.c_float),
        ("scalars", ctypes.c_float * MAX_PARAMS),
        ("tensors", ctypes.c_void_p * MAX_PARAMS),
    ]


def obstacle(plan: AttnPlan, variant: Variant, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why this cannot run here, or None. Builds the hooks of the variant, once for each program and dtype."""
    if native.library() is None:
        return native.explain()
    if q_dtype not in native.DTYPES or kv_dtype not in (q_dtype, torch.int8):
        return (
            "the native kernels take float32, bfloat16 or float16 for q, and the same or int8 for k and v, not "
            f"{q_dtype} and {kv_dtype}"
        )
    most = MAX_LINE_DIM if plan.heads.value_dim and kv_dtype == q_dtype else MAX_HEAD_DIM
    if plan.heads.head_dim > most:
        return f"the native kernels take head_dim up to {most}, not {plan.heads.head_dim}"
    if plan.heads.value_dim and "output_transform" in variant.program.hooks:
        return "values are parts of keys, and the variant transforms outputs"
    return hooks.obstacle(variant, q_dtype, kv_dtype)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See `op.run`. There must be no obstacle. Values that are the first numbers of keys are whole keys here, and so is
    what is made of them, of which the first numbers count."""
    if plan.heads.value_dim:
        if v.data_ptr() != k.data_ptr() or v.stride() != k.stride():
            raise ValueError("values must be a view of the first numbers of the keys")
        of_keys = torch.empty((*q.shape[:2], plan.heads.head_dim), dtype=q.dtype)
        run_native(q, k, k, plan, variant, of_keys, lse)
        out[: plan.n_rows] = of_keys[: plan.n_rows, :, : plan.heads.value_dim]
    else:
        run_native(q, k, v, plan, variant, out, lse)


def run_native(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """`run`, values being as wide as keys."""
    compiled = hooks.compiled(variant, q.dtype, k.dtype)
    arguments = native_args(q, k, v, variant, out, plan.layout)
    arguments.plan, arguments.n_threads = ctypes.addressof(plan.work.native), torch.get_num_threads()
    arguments.lse = None if lse is None else lse.data_ptr()
    arguments.scalars, arguments.tensors = compiled.scalars, compiled.tensors
    compiled.function(ctypes.byref(arguments))


def native_args(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    out: torch.Tensor,
    layout: Layout = Layout.PAGED,
) -> _NativeArgs:
    """The call as C sees it, for a variant without hooks; plan, threads and lse are still to be filled in."""
    return _NativeArgs(
        None, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), None,
        q.stride(0), q.stride(1), *_strides(k, layout), *_strides(v, layout),
        native.DTYPES[q.dtype], k.dtype == torch.int8,
        variant.causal, variant.window, variant.n_first, 0, variant.scale,
    )  # fmt: skip


def _strides(x: torch.Tensor, layout: Layout) -> tuple[int, int, int]:
    """Elements from page to page, head to head, token to token."""
    if layout is Layout.RAGGED:
        token, head, _ = x.stride()
        return 0, head, token
    page, head, token, _ = x.stride()
    return page, head, token
