"""Which builds of the CUDA C++ kernels a linear layer in e4m3 needs, asked while it is loaded, on any device.

Does not own the kernels nor their launches (`hopper.py`). Imports no Triton: machines without a GPU need not have it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch

from quire.kernels.gemm.ahead import Coded, LinearShape
from quire.kernels.gemm.hopper_product import DTYPES, Build, variant_of
from quire.kernels.w8a8.plan import coded_plan
from quire.kernels.w8a8.reference import BLOCK


def ahead(weight_scale: torch.Tensor, x_scale: torch.Tensor | None) -> Coded:
    """What `linear_fp8` compiles for matrices with such scales: see `gemm.build`."""
    return _ahead(2 if weight_scale.dim() == 2 else 1, x_scale is None)


@functools.cache
def _ahead(kind: int, rounds: bool) -> Coded:
    return functools.partial(_variants, kind, rounds and kind == 1)


def _variants(
    kind: int, rounds: bool, layer: LinearShape, dtype: torch.dtype, rows: Iterable[int], n_processors: int, alone: bool
) -> Iterator[tuple[str, tuple[str, ...]]]:
    if static_obstacle(layer.n, layer.k, dtype, layer.silu_mul):
        return
    build = Build(dtype, layer.residual, layer.bias, layer.wide, kind)
    for m in rows:
        made = coded_plan(
            m, layer.n, layer.k, layer.silu_mul, layer.norm, n_processors, alone=alone, rounds=rounds, blocks=kind == 2
        )
        yield variant_of(made.product, made.plan, build, made.codes)


def static_obstacle(n: int, k: int, dtype: torch.dtype, silu_mul: bool) -> str | None:
    """Why no machine could run this with these kernels, or None."""
    if dtype not in DTYPES:
        return f"x is {dtype}: it must be bfloat16 or float16"
    step = 16 if silu_mul else 8
    if k % BLOCK or n % step:
        return f"weights are [{n}, {k}]: the sizes must be multiples of {step} and {BLOCK}"
    return None
