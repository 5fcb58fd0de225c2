"""How a product of e4m3 is cut, by which kernel, and whether it rounds x itself. Plain arithmetic, no torch.

A chunk of 128 bytes takes as long whatever its codes are, so a product of k bytes is planned as one of k / 2 elements.
Invariant: a plan depends on shapes only, so that the same shapes give the same bits and a captured graph stays valid.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from quire.kernels.gemm import wide
from quire.kernels.gemm.estimate import estimate_alone_us, estimate_us
from quire.kernels.gemm.plan import MAX_BYTES, MAX_FEW_ROWS, Plan, ProductShape, plan, shared_bytes
from quire.kernels.gemm.wide import WidePlan, wide_plan

MAX_ROUNDED_ROWS: Final = 1
"""With more rows, each block's own rounding of x costs more than one launch for all."""
EXCHANGE_US: Final = 1.85
"""What doubling the cluster costs there."""
MIN_WIDE_ROWS: Final = 33
"""With fewer the kernel for many rows takes 5 us more than its estimate."""
MAX_TOKENS: Final = 192
"""Of a tile, but where rows fit one of 256: those are not faster a token, yet half as many as of 128."""
MAX_CELLS: Final = 8
"""Of 16 bytes of x that a thread has registers for."""
WIDTH: Final = 8
"""Elements of x in a cell."""


@dataclasses.dataclass(frozen=True, slots=True)
class CodedPlan:
    """Which kernel multiplies, and what it does with x."""

    product: ProductShape
    """In elements of two bytes."""
    plan: Plan | WidePlan
    cells: int = 0
    """Of x that a thread of it rounds (csrc/cuda/gemm/rounding.h); 0: x comes rounded."""
    norms: bool = False
    """It norms x before it rounds it."""

    @property
    def codes(self) -> dict[str, int]:
        """Definitions of the build beside others, without QUIRE_."""
        return {"ROUNDS": self.cells, "NORM": int(self.norms)} if self.cells else {}


def coded_plan(
    m: int, n: int, k: int, silu: bool, norm: bool, n_processors: int, *, alone: bool, rounds: bool
) -> CodedPlan:
    """For x [m, k] and w [n, k]. alone: K is not split, and any number of rows is normed alike. rounds: the product may
    round x, whose rows have a scale each."""
    product = ProductShape(m, n, k // 2, silu=silu)
    made = None
    if rounds and not alone and m <= MAX_ROUNDED_ROWS:
        made = plan(product, n_processors, exchange_us=EXCHANGE_US)
    cells = math.ceil(k / WIDTH / (128 * made.groups)) if made is not None and made.resident else 0
    if made is None or not 0 < cells <= MAX_CELLS:
        return CodedPlan(product, _plan(product, n_processors, alone))
    scratch_bytes = 4 * (2 * 4 * made.groups + product.tokens)  # Rounds in csrc/cuda/gemm/block.h
    if shared_bytes(product, made, made.n_stages) + scratch_bytes > MAX_BYTES:
        made = dataclasses.replace(made, n_stages=made.n_stages - 1)
    return CodedPlan(product, made, cells, norm)


def _plan(product: ProductShape, n_processors: int, alone: bool) -> Plan | WidePlan:
    """The faster one by its estimate. alone: of those that do not split K, which sum in one order."""
    found: list[Plan | WidePlan] = []
    if product.m <= MAX_FEW_ROWS and (few := plan(product, n_processors, alone=alone)) is not None:
        found.append(few)
    if product.m >= MIN_WIDE_ROWS or not found:
        most = MAX_TOKENS if product.m <= MAX_TOKENS or product.m > wide.MAX_TOKENS else wide.MAX_TOKENS
        found.append(wide_plan(product, n_processors, alone=alone, max_tokens=most))
    estimate = estimate_alone_us if alone else estimate_us
    return min(found, key=lambda one: estimate(product, one, n_processors))
