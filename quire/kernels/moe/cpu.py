"""The choice of experts, and experts of packed matrices, on CPU in the native library: one call for each."""

from __future__ import annotations

import ctypes

import torch

from quire.config.experts import RoutingSpec, Scores
from quire.kernels import native
from quire.kernels.moe.packed import PackedExperts

SCORES = {Scores.SOFTMAX: 0, Scores.SIGMOID: 1, Scores.SPARSE_MIXER: 2, Scores.EVEN: 3}
"""QuireScores in csrc/cpu/quire_cpu.h."""

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class NativeRoute(ctypes.Structure):
    """QuireRoute in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("logits", "correction", "expert_ids", "weights", "load")),
        *((name, _L) for name in ("n", "n_experts", "n_chosen", "logits_row")),
        *((name, _L) for name in ("n_groups", "n_chosen_groups", "n_group_best")),
        *((name, ctypes.c_float) for name in ("scale", "mixer_margin")),
        *((name, _I) for name in ("scores", "renormalise", "n_threads")),
    )  # fmt: skip


class NativeExperts(ctypes.Structure):
    """QuireExperts in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("up", "down", "x", "expert_ids", "weights", "out", "scratch")),
        *((name, _L) for name in ("n", "n_chosen", "n_experts", "x_row", "out_row")),
        *((name, _I) for name in ("dtype", "adds", "n_threads")),
    )


def route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py."""
    shape = len(logits), routing.n_chosen
    expert_ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    call = native_route(logits, routing, correction, load, expert_ids, weights)
    native.required().quire_route(ctypes.byref(call))
    return expert_ids, weights


def native_route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> NativeRoute:
    """The call that fills expert_ids and weights, both [n, k]; what it points to must stay."""
    corrected, counted = (None if one is None else one.data_ptr() for one in (correction, load))
    return NativeRoute(
        logits.data_ptr(), corrected, expert_ids.data_ptr(), weights.data_ptr(), counted, len(logits),
        logits.shape[1], routing.n_chosen, logits.stride(0), routing.n_groups, routing.n_chosen_groups,
        routing.n_group_best, routing.scale, routing.mixer_margin, SCORES[routing.scores],
        routing.renormalise, torch.get_num_threads(),
    )  # fmt: skip


def packed_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: PackedExperts,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See packed.py."""
    out = torch.empty(x.shape, dtype=x.dtype) if residual is None else residual
    ids, factors = expert_ids.contiguous(), weights.contiguous()
    scratch = torch.empty(scratch_size(matrices, *ids.shape), dtype=x.dtype)
    call = native_experts(x, ids, factors, matrices, out, scratch, adds=residual is not None)
    native.required().quire_experts(ctypes.byref(call))
    return out


def scratch_size(matrices: PackedExperts, n: int, n_chosen: int) -> int:
    """Numbers that n tokens need beside x and out."""
    return n * n_chosen * (matrices.up[0].k + matrices.down[0].k)


def native_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: PackedExperts,
    out: torch.Tensor,
    scratch: torch.Tensor,
    *,
    adds: bool,
) -> NativeExperts:
    """The call that writes or adds to `out`; what it points to must stay."""
    up, down = matrices.native
    return NativeExperts(
        ctypes.addressof(up), ctypes.addressof(down), x.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(),
        out.data_ptr(), scratch.data_ptr(), *expert_ids.shape, len(up), x.stride(0), out.stride(0),
        native.DTYPES[x.dtype], adds, torch.get_num_threads(),
    )  # fmt: skip
