"""What stands around attention to lines in CUDA C++ for Hopper (csrc/cuda/latent_rows.cu), built by the JIT.

Owns its build, its arguments and its launches: `ask`, `attend` and `values` of op.py, each with conditions of its own
(hopper_ask.py, hopper_attend.py, hopper_values.py). Does not own the kernels. Invariant: a launch allocates only its
result and never waits, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Final

import torch

from quire.kernels.catalog import Slower
from quire.kernels.hopper import build_obstacle, load_variant
from quire.kernels.invariance import are_rows_alone

DTYPES: Final = (torch.bfloat16, torch.float16)
RANK, ROPE, PLAIN = 512, 64, 128
"""Numbers of a line that are normed and that are rotated, and of a head without a position, of queries and values."""
WIDTH: Final = 8
"""Elements in 16 bytes. Strides and addresses are whole multiples of it."""
MAX_ROWS: Final = 512
"""Above, products are long enough for torch's."""


class AskArgs(ctypes.Structure):
    """QuireAskArgs in csrc/cuda/latent_rows.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "lines", "norm", "q", "keys", "asked", "pages", "positions", "cos_sin", "cache_locs",
        )),
        *((name, ctypes.c_int64) for name in ("lines_row", "q_row", "q_head", "keys_head")),
        *((name, ctypes.c_int32) for name in ("n", "n_heads", "n_positions", "wide_positions")),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class ValuesArgs(ctypes.Structure):
    """QuireValuesArgs in csrc/cuda/latent_rows.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("seen", "values", "y")),
        ("values_head", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("n", "n_heads")),
    )


def rows_obstacle(n: int, dtype: torch.dtype) -> str | None:
    """Why neither kernel takes so many rows of this type, or None."""
    if dtype not in DTYPES:
        return f"the type is {dtype}: it must be bfloat16 or float16"
    if not 1 <= n <= MAX_ROWS or are_rows_alone():
        return Slower(f"{n} rows: torch's products are faster from {MAX_ROWS + 1} on, or alike for all numbers of rows")
    return None


def apart(*tensors: torch.Tensor) -> bool:
    """Whether one of them, or a stride but the last, is not at a multiple of 16 bytes."""
    return any(
        one.data_ptr() % (WIDTH * one.element_size()) or any(step % WIDTH for step in one.stride()[:-1])
        for one in tensors
    )  # fmt: skip


@functools.cache
def built(dtype: torch.dtype) -> str | None:
    """Why this machine cannot run them, or None. The first call for a type may compile (seconds)."""
    return build_obstacle(lambda: library(dtype))


def launch(name: str, x: torch.Tensor, *args: ctypes.Structure | None) -> None:
    """Run one of the functions on the current stream of x's device, in the library of x's type."""
    pointers = [None if one is None else ctypes.byref(one) for one in args]
    code = getattr(library(x.dtype), name)(*pointers, torch.cuda.current_stream(x.device).cuda_stream)
    if code:
        raise RuntimeError(f"{name} for {tuple(x.shape)} could not be launched: CUDA error {code}")


@functools.cache
def library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for this type, compiled if they are new. Raises BuildError."""
    found = load_variant("latent_rows.cu", definitions(dtype))
    for name, n_arguments in (("quire_latent_ask", 2), ("quire_latent_values", 3)):
        function = getattr(found, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * n_arguments, ctypes.c_int
    return found


def definitions(dtype: torch.dtype) -> tuple[str, ...]:
    """Of a build."""
    return (f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}",)
