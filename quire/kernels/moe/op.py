"""Public mixture of experts: the choice of experts, and their products. Checks shapes and picks the implementation."""

from __future__ import annotations

from typing import Any

import torch

from quire.config.experts import Gating, RoutingSpec
from quire.kernels.act import sigmoid
from quire.kernels.moe.coded import CodedMatrices, Codes, Matrices
from quire.kernels.selector import select

SWIGLU = Gating()


def route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights.

    logits: [n, E] float32, contiguous rows, n >= 1. routing: see `RoutingSpec`. correction: [E] float32, added to the
    scores for the choice of groups and of experts, not for the weights; not with Scores.SPARSE_MIXER.
    load: [E] int64, contiguous, to which the tokens that chose each expert are added.
    Returns (expert_ids [n, k] int32, weights [n, k] float32), new and contiguous: in each row k distinct ids from 0 to
    E - 1, whatever the logits, NaN among them; the best first, of equal ones the one of the smaller number.
    Sums and powers are in float32. Nothing is read by the host: it may be captured. Raises ValueError on a mismatch.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype} must be [n, E] float32 with contiguous rows")
    _check_routing(logits.shape[1], routing, correction, load)
    found: tuple[torch.Tensor, torch.Tensor] = select("moe", "route", logits)(logits, routing, correction, load)
    return found


def choose(
    x: torch.Tensor,
    router: torch.Tensor,
    routing: RoutingSpec,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of the logits x @ router.T + bias, whose sums are in float32, in one launch where there is a kernel.

    x: [n, hidden], contiguous rows, n >= 1. router: [E, hidden], contiguous, and bias: [E], of x's dtype or float32;
    in float32 the products are, too. The rest, and the result: see `route`. Raises ValueError on a mismatch.
    """
    if x.dim() != 2 or x.stride(1) != 1 or router.dim() != 2 or router.shape[1] != x.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} must be [n, hidden] with contiguous rows, router {tuple(router.shape)}")
    if router.dtype not in (x.dtype, torch.float32) or not router.is_contiguous():
        raise ValueError(f"router {router.dtype} must be contiguous, in float32 or x's dtype {x.dtype}")
    if bias is not None and (bias.shape != (len(router),) or bias.dtype != router.dtype):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype} must be [{len(router)}] of {router.dtype}")
    _check_routing(len(router), routing, correction, load)
    arguments = x, router, bias, routing, correction, load
    found: tuple[torch.Tensor, torch.Tensor] = select("moe", "choose", *arguments)(*arguments)
    return found


def _check_routing(
    n_experts: int, routing: RoutingSpec, correction: torch.Tensor | None, load: torch.Tensor | None
) -> None:
    if n_experts % routing.n_groups or not 1 <= routing.n_chosen_groups <= routing.n_groups:
        raise ValueError(f"{n_experts} experts cannot be divided as {routing} says")
    if not 1 <= routing.n_chosen <= n_experts // routing.n_groups * routing.n_chosen_groups:
        raise ValueError(f"{routing.n_chosen} of {n_experts} experts cannot be chosen as {routing} says")
    if correction is not None and (correction.shape != (n_experts,) or correction.dtype != torch.float32):
        raise ValueError(f"correction {tuple(correction.shape)} {correction.dtype} must be [{n_experts}] float32")
    if load is not None and (load.shape != (n_experts,) or load.dtype != torch.int64):
        raise ValueError(f"load {tuple(load.shape)} {load.dtype} must be [{n_experts}] int64")


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    *,
    gating: Gating = SWIGLU,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t] = sum over j of weights[t, j] * (down[e] @ gating(up[e] @ x[t] + up_bias[e]) + down_bias[e]), where e is
    expert_ids[t, j]; with `residual`, added to it in place.

    x: [n, hidden], last dimension contiguous, n >= 1. expert_ids: [n, k] int32, contiguous, each from -1 to E - 1,
    those of a row distinct; -1 adds nothing, and its weight is not read. weights: [n, k] float32, contiguous.
    up: [E, 2 * inner, hidden], contiguous, x's dtype; of each expert the rows of the gate above those of up.
    down: [E, hidden, inner], likewise. Both may be in codes, see `CodedMatrices`. By e4m3 rows of x, and of the inner
    vectors, are multiplied in e4m3, rounded as in `w8a8.linear_fp8`; by other codes as they are.
    gating: what makes [inner] of these [2 * inner], see `Gating`.
    up_bias: [E, 2 * inner], down_bias: [E, hidden], contiguous, x's dtype.
    residual: [n, hidden], x's dtype, contiguous rows; it takes the sum and is returned. out: the same, where to write;
    not with residual. x must not overlap either. Returns [n, hidden] of x's dtype, residual or out if given.

    Sums are in float32; the inner vector is rounded to x's dtype, an expert's output may be, the result is, once.
    A row's bits may depend on the other rows only through kernel choice by n; in determinism mode they do not.
    The bits of a call are the same at every call: no atomic additions of floating numbers.
    Nothing is read by the host and launches depend on shapes alone: it may be captured, and replayed with other ids.
    Two streams must not run experts at the same time: on Hopper the blocks of a launch wait for each other and count in
    one place. The first call for experts of a size compiles their kernels (seconds).
    Memory of scratch is allocated by torch: at most n * k * (hidden + inner) numbers of x's dtype, or of float32 where
    outputs are not rounded, as many of e4m3 beside them where rows are, and integers of the order of n * k + E.
    An expert without tokens costs no read of its weights. Raises ValueError on a mismatch.
    """
    arguments = experts_arguments(x, expert_ids, weights, up, down, gating, up_bias, down_bias, residual, out)
    y: torch.Tensor = select("moe", "experts", *arguments)(*arguments)
    return y


def experts_with_shared(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    shared_up: torch.Tensor,
    shared_down: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`experts`, and a feed-forward of SwiGLU that every token goes through, for few tokens in one call.

    shared_up: [2 * size, hidden], gate rows first; shared_down: [hidden, size]; both contiguous, of x's dtype. What it
    gives may be added before the sum is rounded, or after, or be rounded into the residual first; in a `rows_alone`
    region that does not depend on n. The shared matrices are read before the kernel launched just before has ended:
    synchronize once after writing them. The rest: see `experts`, without codes and biases.
    """
    arguments = experts_arguments(x, expert_ids, weights, up, down, SWIGLU, None, None, residual, None)
    size, hidden = shared_down.shape[1], x.shape[1]
    if shared_up.shape != (2 * size, hidden) or shared_down.shape[0] != hidden:
        raise ValueError(
            f"shared_up {tuple(shared_up.shape)} and shared_down {tuple(shared_down.shape)} must be"
            f" [2 * size, {hidden}] and [{hidden}, size]"
        )
    if any(one.dtype != x.dtype or not one.is_contiguous() for one in (shared_up, shared_down)):
        raise ValueError(f"shared_up {shared_up.dtype} and shared_down must be contiguous and of x's dtype {x.dtype}")
    arguments = (*arguments[:5], shared_up, shared_down, residual)
    y: torch.Tensor = select("moe", "experts_with_shared", *arguments)(*arguments)
    return y


def experts_arguments(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gating: Gating,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Those of `experts`, in the order of its implementations, once they fit. Raises ValueError."""
    _check_weights(x, up, down, up_bias, down_bias)
    if expert_ids.shape != weights.shape or expert_ids.dim() != 2 or len(expert_ids) != len(x):
        raise ValueError(f"expert_ids {tuple(expert_ids.shape)} and weights {tuple(weights.shape)} must be [n, k]")
    if expert_ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise ValueError(f"expert_ids {expert_ids.dtype} must be int32, and weights {weights.dtype} float32")
    if not (expert_ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError("expert_ids and weights must be contiguous")
    if residual is not None and out is not None:
        raise ValueError("out cannot be given with residual, which takes the result")
    target = out if residual is None else residual
    if target is not None and (target.shape != x.shape or target.dtype != x.dtype or target.stride(1) != 1):
        name = "out" if residual is None else "residual"
        raise ValueError(f"{name} {tuple(target.shape)} {target.dtype} must be as x {tuple(x.shape)} {x.dtype}")
    return x, expert_ids, weights, up, down, gating, up_bias, down_bias, residual, out


def _check_weights(
    x: torch.Tensor,
    up: Matrices,
    down: Matrices,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or len(up.shape) != 3 or len(down.shape) != 3:
        raise ValueError(
            f"x {tuple(x.shape)} must be [n, hidden] with contiguous rows, up {tuple(up.shape)} and down"
            f" {tuple(down.shape)} three-dimensional"
        )
    n_experts, hidden_size, inner = down.shape
    if up.shape != (n_experts, 2 * inner, hidden_size) or x.shape[1] != hidden_size:
        raise ValueError(f"x {tuple(x.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} do not fit")
    for name, matrices in (("up", up), ("down", down)):
        if isinstance(matrices, CodedMatrices):
            if matrices.kind is Codes.INT4 and matrices.scales.dtype != x.dtype:
                raise ValueError(f"scales of {name} {matrices.scales.dtype} must be of x's dtype {x.dtype}")
        elif not matrices.is_contiguous() or matrices.dtype != x.dtype:
            raise ValueError(f"{name} {matrices.dtype} must be contiguous and of x's dtype {x.dtype}")
    for name, bias, width in (("up_bias", up_bias, 2 * inner), ("down_bias", down_bias, hidden_size)):
        if bias is not None and (bias.shape != (n_experts, width) or bias.dtype != x.dtype or not bias.is_contiguous()):
            raise ValueError(
                f"{name} {tuple(bias.shape)} {bias.dtype} must be [{n_experts}, {width}] of {x.dtype}, contiguous"
            )


def build_rows(n_experts: int, n_chosen: int, max_rows: int) -> list[int]:
    """Numbers of rows, up to max_rows, that are computed in different ways: `experts` called once with each, no later
    call has to wait for a kernel. Blocks of an expert's tokens double in size as the mean does, to a limit."""
    found = {1, max_rows} | {-(-(mean + 1) * n_experts // n_chosen) for mean in (8, 16, 32, 64)}
    return sorted(n for n in found if n <= max_rows)


def gate(both: torch.Tensor, gating: Gating) -> torch.Tensor:
    """What `gating` makes of [n, 2 * inner], gates first → [n, inner] of its dtype, on any device. For experts that are
    multiplied by one after another."""
    gates, ups = both.float().chunk(2, dim=-1)
    if gating.limit:
        gates, ups = gates.clamp(max=gating.limit), ups.clamp(-gating.limit, gating.limit)
    return ((ups + gating.offset) * gates * sigmoid(gating.slope * gates)).to(both.dtype)
