"""The row kernels in CUDA C++ for Hopper (csrc/cuda/rows.cu), built by the JIT with nvcc, one library a dtype.

Owns their build and launch; what they are given: hopper.py of norm, qkv and act, rounding.py of w8a8. Does not own the
kernels.
Invariant: a launch allocates nothing and never waits, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from quire.kernels import jit
from quire.kernels.hopper import FLAGS, build_obstacle

DTYPES = (torch.bfloat16, torch.float16)
WIDTH = 8
"""Elements that a thread moves at once. Sizes, strides and addresses are whole multiples of it."""
ALIGNMENT_BYTES = 16
FUNCTIONS = ("quire_norm", "quire_rotate_and_store", "quire_silu_mul", "quire_round")


@functools.cache
def obstacle(dtype: torch.dtype) -> str | None:
    """Why these kernels cannot run here on tensors of this type, or None. The first call may compile (seconds)."""
    if dtype not in DTYPES:
        return f"the type is {dtype}: it must be bfloat16 or float16"
    return build_obstacle(lambda: _library(dtype))


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether the tensors that are there begin at multiples of 16 bytes."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % ALIGNMENT_BYTES == 0


def launch(name: str, x: torch.Tensor, args: ctypes.Structure) -> None:
    """Run one of `FUNCTIONS` on the current stream of x's device, in the library of x's type."""
    stream = torch.cuda.current_stream(x.device).cuda_stream
    code = getattr(_library(x.dtype), name)(ctypes.byref(args), stream)
    if code:
        raise RuntimeError(f"{name} for {tuple(x.shape)} could not be launched: CUDA error {code}")


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Compiled if it is new. Raises BuildError, and ValueError for a type that the kernels do not have."""
    if dtype not in DTYPES:
        raise ValueError(f"the row kernels for Hopper take bfloat16 and float16, not {dtype}")
    flags = [*FLAGS, f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}"]
    path = jit.shared_library("rows", [jit.sources_folder() / "cuda" / "rows.cu"], flags, "", "nvcc")
    library = ctypes.CDLL(str(path))
    for name in FUNCTIONS:
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return library
