"""Compiled products of csrc/cuda/gemm.cu and gemm_wide.cu, whatever w is kept as: how they are built and called.

Owns their arguments, definitions and launch. Does not own which is best, nor what stands before the product (norms,
rounding). Invariant: a launch allocates only its result and room for sums, and never waits, so it can be captured in a
CUDA graph.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Final

import torch

from quire.kernels.gemm.plan import N_AHEAD, Plan, ProductShape
from quire.kernels.gemm.wide import TILE_ROWS, WidePlan
from quire.kernels.hopper import load_variant

DTYPES: Final = (torch.bfloat16, torch.float16)
ALIGNMENT_BYTES: Final = 16
ROW_STEP: Final = 8
"""As many elements of `DTYPES` take `ALIGNMENT_BYTES`."""
MAX_ROWS: Final = 1 << 16


class Args(ctypes.Structure):
    """QuireGemmArgs in csrc/cuda/gemm/block.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "w", "norm_weight", "bias", "residual", "y", "x_scale", "w_scale")],
        *[(name, ctypes.c_int64) for name in ("x_row", "residual_row", "y_row")],
        *[(name, ctypes.c_int32) for name in (
            "m", "n", "k", "n_clusters", "n_stages", "n_ahead", "dependent", "token_bits",
            "x_scale_step", "w_scale_step", "group",
        )],
        ("eps", ctypes.c_float),
    ]  # fmt: skip


class WideArgs(ctypes.Structure):
    """QuireWideArgs in csrc/cuda/gemm_wide.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "w", "bias", "y", "sums", "x_scale", "w_scale")],
        *[(name, ctypes.c_int64) for name in ("x_row", "y_row")],
        *[(name, ctypes.c_int32) for name in (
            "m", "n", "k", "x_scale_step", "w_scale_step", "group", "n_teams", "n_together",
        )],
    ]  # fmt: skip


class AdaptedArgs(ctypes.Structure):
    """The same with QuireWideAdapters in csrc/cuda/gemm/wide_adapters.h."""

    _fields_ = [
        *WideArgs._fields_,
        *[(name, ctypes.c_void_p) for name in ("b", "inner", "tiles")],
        ("b_place", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("n_places", "n_tiles", "n_parts", "width")],
        ("part_ends", ctypes.c_int32 * 4),
    ]  # fmt: skip


@functools.cache
def sent_args(n_ranks: int) -> type[ctypes.Structure]:
    """`WideArgs` with QuireWideSent in csrc/cuda/gemm/wide_sent.h."""

    class SentArgs(ctypes.Structure):
        _fields_ = [
            *WideArgs._fields_,
            ("to", ctypes.c_void_p * n_ranks),
            ("control", ctypes.c_void_p),
            ("parity_bytes", ctypes.c_int64),
            ("to_all", ctypes.c_int32),
        ]

    return SentArgs


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """What one library is compiled for, beside its plan."""

    dtype: torch.dtype
    residual: bool
    bias: bool
    wide: bool
    """The result is float32."""
    fp8: int = 0
    """QUIRE_FP8 in csrc/cuda/gemm.h."""
    sent_to: int = 0
    """Ranks to which the result goes (gemm/sent.py); 0: it stays here."""


class CompiledProduct:
    """A compiled kernel and how to cut its product."""

    __slots__ = ("function", "n_sums", "plan")

    def __init__(self, function: Callable[..., int], plan: Plan | WidePlan) -> None:
        self.function, self.plan = function, plan
        self.n_sums = plan.sums_size if isinstance(plan, WidePlan) else 0

    def start(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        size: tuple[int, ...],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        norm: tuple[torch.Tensor, float] | None,
        residual: torch.Tensor | None,
        silu_mul: bool,
        out: torch.Tensor | None,
        x_scale: torch.Tensor | None = None,
        w_scale: torch.Tensor | None = None,
        steps: tuple[int, int] = (0, 0),
        group: int = 0,
        adapters: tuple[object, ...] = (),
        sent: tuple[tuple[int, ...], int, int, int] | None = None,
    ) -> torch.Tensor:
        """x [m, k] times w of size [n, k], elements or codes with their scales; the result, of `dtype` if it is new, is
        in `residual` or `out` if given. norm: of few rows alone. steps: x_scale_step and w_scale_step. adapters: the
        values of `AdaptedArgs`' own fields, of many rows. sent: those of `sent_args`; nothing is stored then. Raises
        RuntimeError if it cannot be launched."""
        m, (n, k), plan = x.shape[0], size, self.plan
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(m, n // 2 if silu_mul else n, dtype=dtype, device=x.device)
        x_row = x.stride(0) if m > 1 else k
        pointers = (
            None if x_scale is None else x_scale.data_ptr(), None if w_scale is None else w_scale.data_ptr(),
        )  # fmt: skip
        if isinstance(plan, WidePlan):
            sums = torch.empty(self.n_sums, dtype=torch.float32, device=x.device)
            more: tuple[object, ...] = adapters
            kind: type[ctypes.Structure] = AdaptedArgs if adapters else WideArgs
            if sent is not None:
                kind = sent_args(len(sent[0]))
                more = ((ctypes.c_void_p * len(sent[0]))(*sent[0]), *sent[1:])
            args: ctypes.Structure = kind(
                x.data_ptr(), w.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), sums.data_ptr(),
                *pointers, x_row, y.stride(0), m, n, k, *steps, group, plan.n_teams, plan.n_together,
                *more,
            )  # fmt: skip
        else:
            args = Args(
                x.data_ptr(), w.data_ptr(), None if norm is None else norm[0].data_ptr(),
                None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(),
                y.data_ptr(), *pointers, x_row, 0 if residual is None else residual.stride(0), y.stride(0),
                m, n, k, plan.n_clusters, plan.n_stages, N_AHEAD, 1, (m - 1).bit_length(), *steps, group,
                0.0 if norm is None else norm[1],
            )  # fmt: skip
        code = self.function(ctypes.byref(args), torch.cuda.current_stream(x.device).cuda_stream)
        if code:
            raise RuntimeError(f"x [{m}, {k}] times w [{n}, {k}] could not be launched: CUDA error {code}")
        return y


def lies_wrong(y: torch.Tensor) -> str | None:
    """Why `WidePlan`s cannot store a result there, or None."""
    if (y.data_ptr() | y.stride(0) * y.element_size()) % ALIGNMENT_BYTES:
        return f"rows of the result do not start at multiples of {ALIGNMENT_BYTES} bytes"
    return None


@functools.cache
def n_processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def function_of(
    product: ProductShape, plan: Plan | WidePlan, build: Build, codes: Mapping[str, int] = {}
) -> Callable[..., int]:
    """The library's function for a plan. codes: see `variant_of`. Raises BuildError."""
    library = load_variant(*variant_of(product, plan, build, codes))
    function = library.quire_gemm_wide if isinstance(plan, WidePlan) else library.quire_gemm
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def variant_of(
    product: ProductShape, plan: Plan | WidePlan, build: Build, codes: Mapping[str, int] = {}
) -> tuple[str, tuple[str, ...]]:
    """(source in csrc/cuda, definitions): what tells the library of a plan from others. codes: definitions beside
    these, without QUIRE_."""
    macros: dict[str, int] = {
        "SILU": product.silu,
        "BF16": build.dtype is torch.bfloat16,
        "RESIDUAL": build.residual,
        "BIAS": build.bias,
        "WIDE": build.wide,
        "FP8": build.fp8,
    } | ({"SENT_TO": build.sent_to} if build.sent_to else {})
    if isinstance(plan, WidePlan):
        source = "gemm_wide.cu"
        macros |= {"TOKENS": plan.tokens, "SPLIT": plan.split}
        macros |= {"ROWS": plan.rows} if plan.rows != TILE_ROWS else {}
    else:
        source = "gemm.cu"
        macros |= {
            "TOKENS": product.tokens,
            "CLUSTER": plan.cluster,
            "GROUPS": plan.groups,
            "TURNS": plan.turns,
            "RESIDENT": plan.resident,
            "NORM": product.norm,
        }
    return source, tuple(f"-DQUIRE_{name}={int(value)}" for name, value in {**macros, **codes}.items())
