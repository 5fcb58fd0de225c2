"""How long a linear layer takes by the kernel for few rows, by the one for many, and by torch's product.

Estimates are fitted to an H200 (docs/lab-notes.md, sections 10 and 12), within about a tenth of what was measured. Owns
no tiling (plan.py, wide.py). Invariant: the choice depends on shapes only. Plain arithmetic, no torch.
"""

from __future__ import annotations

import functools
import math

from quire.kernels.gemm.plan import MAX_FEW_ROWS, MAX_NORM_ROWS, Plan, ProductShape, plan, plan_us
from quire.kernels.gemm.wide import WidePlan, wide_plan, wide_us

MIN_WIDE_ROWS = 17
NORM_US, FUSED_NORM_MB_US = 1.2, 24.0
"""A norm of few rows by its own kernel; fused, for each megabyte of x that every block norms."""
LEAD = 0.985
"""With several tiles of tokens the kernel for many rows must win by its estimate: at a tie (512 rows) it was slower."""
TORCH_START_US, TORCH_ROWS, TORCH_GFLOP_US = 2.9, 128, 0.78
"""For a launch; torch's tiles waste what is missing to a multiple of so many rows."""
TORCH_GAPS_US = 1.2
"""What torch's product loses in a model, where it waits for the end of the kernel before it and is waited for; kernels
of our own are dependent launches. Measured in chains of layers: 0.9 to 2 us; from 512 rows on it is nothing."""
MAX_GAPS_ROWS = 384
FEW_START_US, FEW_ROWS_US, FEW_MB_US, FEW_LONG_K = 2.0, 0.4, 4.5, 4096
"""For a launch; for the root of the rows, where K is long; megabytes of w a microsecond."""
FEW_SPLIT_US, TORCH_SPLIT_US, MAX_SPLIT, LARGE_N = 0.4, 1.45, 4, 4096
"""What a K that is long for its n costs, in multiples of n; less where n is small."""
ACTIVATION_US, ACTIVATION_MB_US = 0.8, 4.4


@functools.cache
def fastest(product: ProductShape, n_processors: int, alone: bool = False, left: int = 0) -> Plan | WidePlan | str:
    """The plan of the fastest kernel, or why there is none: torch is faster, or a norm is better not fused.

    alone: of the plans that do not split K. All of these sum in one order, that of the columns, one matrix instruction
    of 16 after another, so that a row has the same bits by each of them, in any number of rows. left: processors that
    a product of many rows leaves free, which torch's does not.
    """
    if left and product.m > MAX_FEW_ROWS and not product.norm:
        return wide_plan(product, n_processors - left, alone=alone)
    if alone:
        return _fastest_alone(product, n_processors)
    found: list[tuple[float, Plan | WidePlan | str]] = []
    torch_us = torch_estimate_us(product) + (NORM_US if product.norm else 0.0)
    if product.m <= MAX_GAPS_ROWS:
        torch_us += TORCH_GAPS_US
    found.append((torch_us, "torch"))
    if product.m <= MAX_FEW_ROWS and (made := plan(product, n_processors)) is not None:
        found.append((few_us(product), made))
    if product.norm:
        bare = ProductShape(product.m, product.n, product.k, silu=product.silu)
        rest = fastest(bare, n_processors)
        if not isinstance(rest, str):
            found.append((NORM_US + estimate_us(bare, rest, n_processors), "a norm of its own and a kernel without"))
    elif product.m >= MIN_WIDE_ROWS:
        wide = wide_plan(product, n_processors)
        lead = LEAD if product.m > wide.tokens else 1.0
        found.append((wide_us(product, wide, n_processors) / lead, wide))
    best_us, best = min(found, key=lambda one: one[0])
    if isinstance(best, str):
        return f"{best} is estimated to be faster for these shapes ({best_us:.1f} us)"
    return best


def _fastest_alone(product: ProductShape, n_processors: int) -> Plan | WidePlan | str:
    if product.norm:
        return "a norm of few rows is summed in another order"
    found: list[Plan | WidePlan] = [wide_plan(product, n_processors, alone=True)]
    if product.m <= MAX_FEW_ROWS and (few := plan(product, n_processors, alone=True)) is not None:
        found.append(few)
    return min(found, key=lambda one: estimate_alone_us(product, one, n_processors))


def estimate_alone_us(product: ProductShape, made: Plan | WidePlan, n_processors: int) -> float:
    """About how long the kernel of a plan that does not split K takes."""
    return wide_us(product, made, n_processors) if isinstance(made, WidePlan) else plan_us(product, made, n_processors)


def estimate_us(product: ProductShape, made: Plan | WidePlan, n_processors: int) -> float:
    """About how long the kernel of a plan takes."""
    return wide_us(product, made, n_processors) if isinstance(made, WidePlan) else few_us(product)


def few_us(product: ProductShape) -> float:
    """About how long the kernel for few rows takes."""
    norm_us = FUSED_NORM_MB_US * product.m * product.k * 2e-6 if product.norm and product.m <= MAX_NORM_ROWS else 0.0
    memory_us = product.n * product.k * 2e-6 / FEW_MB_US * (1.02 + 0.0008 * product.m)
    rows_us = FEW_ROWS_US * math.sqrt(product.m) * min(1.0, product.k / FEW_LONG_K)
    return FEW_START_US + rows_us + memory_us + FEW_SPLIT_US * _split(product) + norm_us


def torch_estimate_us(product: ProductShape) -> float:
    """About how long torch's product takes, with the activation after it but without a norm."""
    rows = product.m if product.m <= TORCH_ROWS else math.ceil(product.m / TORCH_ROWS) * TORCH_ROWS
    memory_us = product.n * product.k * 2e-6 / (4.4 - 0.0045 * min(product.m, TORCH_ROWS))
    multiply_us = 2e-9 * rows * product.n * product.k / TORCH_GFLOP_US
    activation_us = ACTIVATION_US + product.m * product.n * 3e-6 / ACTIVATION_MB_US if product.silu else 0.0
    return TORCH_START_US + max(memory_us, multiply_us) + TORCH_SPLIT_US * _split(product) + activation_us


def _split(product: ProductShape) -> float:
    return min(product.k / product.n, MAX_SPLIT) * math.sqrt(min(1.0, product.n / LARGE_N))
