"""`wide.collect` in CUDA C++ for Hopper (csrc/cuda/sample.cu): half of the instructions, so near what memory gives."""

from __future__ import annotations

import ctypes
import functools

import torch

from quire.kernels.catalog import Slower
from quire.kernels.hopper import build_obstacle, load_variant

ALIGNMENT_BYTES = 16
"""Of rows: a thread reads so much at once."""


class _CollectArgs(ctypes.Structure):
    """QuireCollectArgs in csrc/cuda/sample.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("logits", "slopes", "kinds", "marks", "sums", "n_listed")],
        *[(name, ctypes.c_void_p) for name in ("values", "columns", "groups", "more")],
        *[(name, ctypes.c_int64) for name in ("row", "groups_row", "more_row")],
        *[(name, ctypes.c_int32) for name in ("n_rows", "width", "n_spans", "room", "bytes")],
        ("least_slope", ctypes.c_float),
    ]  # fmt: skip


def obstacle(logits: torch.Tensor) -> str | None:
    """Why this kernel does not run on these logits, or None. May compile it (seconds)."""
    if (logits.stride(0) * logits.element_size()) % ALIGNMENT_BYTES or logits.data_ptr() % ALIGNMENT_BYTES:
        return Slower(f"rows of {logits.stride(0)} logits do not begin at multiples of {ALIGNMENT_BYTES} bytes")
    return _machine_obstacle(logits.dtype)


@functools.cache
def _machine_obstacle(dtype: torch.dtype) -> str | None:
    return build_obstacle(lambda: _library(dtype))


def collect(
    logits: torch.Tensor, stride: int, width: int, controls: torch.Tensor, line: int, n_spans: int,
    kinds: torch.Tensor, marks: torch.Tensor, sums: torch.Tensor, n_listed: torch.Tensor, values: torch.Tensor,
    columns: torch.Tensor, floats: torch.Tensor, more: torch.Tensor, least_slope: float,
) -> None:  # fmt: skip
    """See `wide.collect`."""
    n_rows, groups_row = floats.shape
    args = _CollectArgs(
        logits.data_ptr(), controls.data_ptr() + line * controls.element_size(), kinds.data_ptr(), marks.data_ptr(),
        sums.data_ptr(), n_listed.data_ptr(), values.data_ptr(), columns.data_ptr(),
        floats.data_ptr() + groups_row // 2 * floats.element_size(), more.data_ptr(), stride, groups_row, more.shape[1],
        n_rows, width, n_spans, values.shape[1], logits.element_size(), least_slope,
    )  # fmt: skip
    launch(logits, args)


def launch(logits: torch.Tensor, args: ctypes.Structure) -> None:
    """Run the kernel on the current stream of the logits' device."""
    stream = torch.cuda.current_stream(logits.device).cuda_stream
    code = _library(logits.dtype).quire_collect(ctypes.byref(args), stream)
    if code:
        raise RuntimeError(f"quire_collect for {tuple(logits.shape)} could not be launched: CUDA error {code}")


def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """Compiled if it is new. Both take float32. Raises BuildError."""
    return _built(dtype is not torch.float16)


@functools.cache
def _built(is_bf16: bool) -> ctypes.CDLL:
    library = load_variant("sample.cu", (f"-DQUIRE_BF16={int(is_bf16)}",))
    library.quire_collect.argtypes, library.quire_collect.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return library
