"""The choice of experts from rows of x in CUDA C++ for Hopper (csrc/cuda/router.cu), built by the JIT.

Owns its build, its arguments and its launch. Does not own the kernel. Invariant: a launch allocates only its results
and never waits, so it can be captured in a CUDA graph; the bits of a row do not depend on the other rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

import torch

from quire.config.experts import RoutingSpec, Scores
from quire.kernels.catalog import Slower
from quire.kernels.hopper import build_obstacle, load_variant
from quire.kernels.invariance import are_rows_alone

DTYPES: Final = (torch.bfloat16, torch.float16)
WIDTH: Final = 8
"""Elements of x in 16 bytes. Sizes, strides and addresses are whole multiples of it."""
MAX_ROWS: Final = 512
"""Weights are read once for eight rows: for more rows torch's product is faster."""
MAX_EXPERTS: Final = 512
MOST: Final = 32
"""Experts of a row, and groups: a lane of a warp has one."""
SCORES: Final = {Scores.SOFTMAX: 0, Scores.SIGMOID: 1, Scores.EVEN: 2}


class Args(ctypes.Structure):
    """QuireRouterArgs in csrc/cuda/router.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "bias", "correction", "load", "expert_ids", "weights")),
        ("x_row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("n", "hidden", "n_experts", "n_chosen")),
        *((name, ctypes.c_int32) for name in ("n_groups", "n_chosen_groups", "n_group_best")),
        *((name, ctypes.c_int32) for name in ("scores", "renormalise")),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def static_obstacle(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
) -> str | None:
    """Why no machine could run this with the kernel, or None."""
    (n, hidden), n_experts = x.shape, len(router)
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}: it must be bfloat16 or float16"
    if routing.scores not in SCORES:
        return f"{routing.scores.value} is not for this kernel"
    if n_experts > MAX_EXPERTS or max(routing.n_chosen, routing.n_groups) > MOST:
        return (
            f"{routing.n_chosen} of {n_experts} experts in {routing.n_groups} groups: at most {MOST} of {MAX_EXPERTS}"
            f" in {MOST}"
        )
    if hidden % WIDTH or x.stride(0) % WIDTH or (x.data_ptr() | router.data_ptr()) % 16:
        return f"rows of {hidden} elements, {x.stride(0)} apart, do not begin at multiples of 16 bytes"
    if n > MAX_ROWS and not are_rows_alone():
        return Slower(f"{n} rows: torch's product is faster from {MAX_ROWS + 1} on")
    return None


def obstacle(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
) -> str | None:
    """Why the kernel does not take these arguments here, or None. The first call for their types may compile."""
    return static_obstacle(x, router, bias, routing, correction, load) or _built(x.dtype, router.dtype)


@functools.cache
def _built(dtype: torch.dtype, router_dtype: torch.dtype) -> str | None:
    return build_obstacle(lambda: function_of(dtype, router_dtype))


def choose(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py."""
    (n, hidden), n_experts = x.shape, len(router)
    expert_ids = torch.empty(n, routing.n_chosen, dtype=torch.int32, device=x.device)
    weights = torch.empty(n, routing.n_chosen, dtype=torch.float32, device=x.device)
    pointers = (x, router, bias, correction, load, expert_ids, weights)
    args = Args(
        *(None if one is None else one.data_ptr() for one in pointers), x.stride(0),
        n, hidden, n_experts, routing.n_chosen,
        routing.n_groups, routing.n_chosen_groups, min(routing.n_group_best, n_experts // routing.n_groups),
        SCORES[routing.scores], routing.renormalise, routing.scale,
    )  # fmt: skip
    code = function_of(x.dtype, router.dtype)(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
    if code:
        raise RuntimeError(f"the choice for {tuple(x.shape)} could not be launched: CUDA error {code}")
    return expert_ids, weights


@functools.cache
def function_of(dtype: torch.dtype, router_dtype: torch.dtype) -> Callable[..., int]:
    """The kernel for these types, compiled if it is new. Raises BuildError."""
    library = load_variant("router.cu", definitions(dtype, router_dtype))
    function = library.quire_router
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return function


def definitions(dtype: torch.dtype, router_dtype: torch.dtype) -> tuple[str, ...]:
    """Of a build."""
    return f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}", f"-DQUIRE_WIDE={int(router_dtype is torch.float32)}"
