"""Products of many rows whose result, a rank's term of a sum, goes to those that sum it (csrc/cuda/gemm/wide_sent.h).

Owns which build runs. Does not own the memory that it is sent to, nor the sum (`kernels/reduce/hopper.py`).
Invariant: the plan depends on shapes only, as of all products of many rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import torch

from quire.kernels.gemm.hopper import static_obstacle
from quire.kernels.gemm.hopper_product import (
    ALIGNMENT_BYTES,
    MAX_ROWS,
    ROW_STEP,
    Build,
    CompiledProduct,
    function_of,
    n_processors_of,
)
from quire.kernels.gemm.plan import MAX_FEW_ROWS, ProductShape
from quire.kernels.gemm.wide import wide_plan
from quire.kernels.hopper import built
from quire.kernels.invariance import are_rows_alone

SENT_ROWS: Final = 8
"""Rows side by side that go to one rank."""
SENT_COLUMNS: Final = 64
"""Of which the result has a multiple."""
MIN_SENT_ROWS: Final = MAX_FEW_ROWS + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where a result goes: QuireWideSent."""

    to: tuple[int, ...]
    """Addresses in the memory of each rank."""
    control: int
    """Address in this rank's."""
    parity_bytes: int
    to_all: bool
    """Every row goes to every rank, else to the one that owns it."""


def prepare(x: torch.Tensor, w: torch.Tensor, n_ranks: int, has_bias: bool) -> CompiledProduct | str:
    """x [m, k], w [n, k] → the product ready for `send`, or why there is none. Compiles what is new (seconds)."""
    m, (n, k) = len(x), w.shape
    if not MIN_SENT_ROWS <= m <= MAX_ROWS:
        return f"{m} rows are not within {MIN_SENT_ROWS}..{MAX_ROWS}"
    if not x.is_cuda or x.dtype != w.dtype or x.stride(1) != 1:
        return f"x {x.dtype} on {x.device} and w {w.dtype} are not of one type, in rows, on a GPU"
    if x.data_ptr() % ALIGNMENT_BYTES or w.data_ptr() % ALIGNMENT_BYTES or x.stride(0) % ROW_STEP:
        return f"rows of x or w do not start at multiples of {ALIGNMENT_BYTES} bytes"
    if n % SENT_COLUMNS:
        return f"{n} columns are not a multiple of {SENT_COLUMNS}"
    return _prepared(m, n, k, x.dtype, x.device, n_ranks, has_bias, are_rows_alone())


@functools.cache
def _prepared(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, n_ranks: int, has_bias: bool, alone: bool
) -> CompiledProduct | str:
    product = ProductShape(m, n, k)

    def make() -> CompiledProduct:
        plan = wide_plan(product, n_processors_of(device), alone=alone)
        return CompiledProduct(function_of(product, plan, sent_build(dtype, n_ranks, has_bias)), plan)

    found = static_obstacle(product, dtype)
    return built(make) if found is None else found


def sent_build(dtype: torch.dtype, n_ranks: int, has_bias: bool) -> Build:
    """What the library is compiled for."""
    return Build(dtype, residual=False, bias=has_bias, wide=False, sent_to=n_ranks)


def send(product: CompiledProduct, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, places: Places) -> None:
    """x @ w.T + bias to its places; for the arguments that it was prepared for."""
    given = (places.to, places.control, places.parity_bytes, int(places.to_all))
    product.start(x, w, (w.shape[0], w.shape[1]), x.dtype, bias, None, None, False, x, sent=given)
