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
from quire.kernels.gemm.plan import (
    MAX_BYTES,
    MAX_FEW_ROWS,
    MAX_RESIDENT_ROWS,
    Plan,
    ProductShape,
    plan,
    shared_bytes,
)
from quire.kernels.gemm.wide import TURNED_TOKENS, WidePlan, multiplied, turned_plan, wide_plan

MAX_ROUNDED_ROWS: Final = 1
"""With more rows, each block's own rounding of x costs more than one launch for all."""
EXCHANGE_US: Final = 1.85
"""What doubling the cluster costs there."""
TURNS_US: Final = 2.1
"""What warpgroups lose that take tiles in turn, with 17 rows and more: each adds up its chunks one after another."""
FEW_US: Final = 1.8
"""What the kernel for few rows takes beyond its estimate, with more than 32."""
UNTURNED: Final = 1.3
"""Of blocks: how much longer a product takes where tokens are its columns: a scale is read for every second sum."""
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
    m: int,
    n: int,
    k: int,
    silu: bool,
    norm: bool,
    n_processors: int,
    *,
    alone: bool,
    rounds: bool,
    blocks: bool = False,
) -> CodedPlan:
    """For x [m, k] and w [n, k]. alone: K is not split, and any number of rows is normed alike. rounds: the product may
    round x, whose rows have a scale each. blocks: scales are those of blocks."""
    product = ProductShape(m, n, k // 2, silu=silu)
    made = None
    if rounds and not alone and m <= MAX_ROUNDED_ROWS:
        made = plan(product, n_processors, exchange_us=EXCHANGE_US)
    cells = math.ceil(k / WIDTH / (128 * made.groups)) if made is not None and made.resident else 0
    if made is None or not 0 < cells <= MAX_CELLS:
        return CodedPlan(product, _plan(product, n_processors, alone, blocks))
    scratch_bytes = 4 * (2 * 4 * made.groups + product.tokens)  # Rounds in csrc/cuda/gemm/block.h
    if shared_bytes(product, made, made.n_stages) + scratch_bytes > MAX_BYTES:
        made = dataclasses.replace(made, n_stages=made.n_stages - 1)
    return CodedPlan(product, made, cells, norm)


def _plan(product: ProductShape, n_processors: int, alone: bool, blocks: bool) -> Plan | WidePlan:
    """The faster one by its estimate. alone: of those that do not split K, which sum in one order."""
    found: list[tuple[float, Plan | WidePlan]] = []
    estimate = estimate_alone_us if alone else estimate_us
    turns_us = TURNS_US if product.m > MAX_RESIDENT_ROWS else 0.0
    if product.m <= MAX_FEW_ROWS and (few := plan(product, n_processors, alone=alone, turns_us=turns_us)) is not None:
        late_us = FEW_US if product.m >= MIN_WIDE_ROWS else 0.0
        found.append((estimate(product, few, n_processors) + late_us, few))
    if product.m >= MIN_WIDE_ROWS or not found:
        most = MAX_TOKENS if product.m <= MAX_TOKENS or product.m > wide.MAX_TOKENS else wide.MAX_TOKENS
        made = wide_plan(product, n_processors, alone=alone, max_tokens=most)
        if blocks and product.m > TURNED_TOKENS and not (product.silu and product.n % 64):
            turned = turned_plan(product, n_processors)
            if multiplied(product, turned) < UNTURNED * multiplied(product, made):
                made = turned
        found.append((estimate(product, made, n_processors), made))
    return min(found, key=lambda one: one[0])[1]
