"""Builds the kernels that linear layers will want, before the first step needs them.

Owns which numbers of rows are tried. Invariant: nothing is launched; what cannot be built is left to `linear`, which
says why.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from quire.kernels import jit
from quire.kernels.gemm.estimate import fastest
from quire.kernels.gemm.hopper import static_obstacle
from quire.kernels.gemm.hopper_product import Build, n_processors_of, variant_of
from quire.kernels.gemm.plan import MAX_NORM_ROWS, ProductShape
from quire.kernels.gemm.sent import MIN_SENT_ROWS, sent_build
from quire.kernels.gemm.wide import takes_adapters, wide_plan
from quire.kernels.hopper import compile_variant, machine_obstacle
from quire.kernels.invariance import are_rows_alone

logger = logging.getLogger("quire.kernels")

_Variant = tuple[str, tuple[str, ...]]
"""Source and definitions, for `compile_variant`."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer as `linear` is called for it."""

    n: int
    k: int
    norm: bool = False
    silu_mul: bool = False
    residual: bool = False
    bias: bool = False
    wide: bool = False
    """The result is float32."""
    sent_to: int = 0
    """Ranks to which the result of many rows goes (sent.py)."""


Coded = Callable[[LinearShape, torch.dtype, Iterable[int], int, bool], Iterable[_Variant]]
"""Of a layer whose matrix is codes, a type, numbers of rows, a GPU's processors and whether rows are alone: what its
product wants."""


def build(
    layers: Iterable[LinearShape], dtype: torch.dtype, device: torch.device, max_rows: int, rank: int = 0,
    beside: Callable[[torch.dtype, int], _Variant] | None = None,
    coded: Iterable[tuple[LinearShape, Coded]] = (),
) -> None:  # fmt: skip
    """Compile what `linear` picks for any number of rows up to max_rows, in parallel (seconds if they are new); with a
    rank also what adds adapters with room for it. beside: of a type and k, the variant that is launched before those.
    coded: layers whose matrices are codes; the same shape may be there in several forms, and among layers.

    A kernel that is only best for a few numbers of rows above 1,024 may be missed; its first call then compiles it.
    """
    if device.type != "cuda" or machine_obstacle():
        return
    start_s = time.perf_counter()
    n_processors = n_processors_of(device)
    alone = are_rows_alone()
    given = (dtype, max_rows, n_processors, alone, 0 if alone else rank, beside)
    variants = {one for layer in set(layers) for one in _variants(layer, *given)}
    for layer, wanted in set(coded):
        variants |= set(wanted(layer, dtype, _rows(max_rows), n_processors, alone))
    with contextlib.suppress(jit.BuildError), concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda variant: compile_variant(*variant), sorted(variants)))
    logger.info("linear layers: %d kernels ready in %.1f s", len(variants), time.perf_counter() - start_s)


def _rows(max_rows: int) -> Iterator[int]:
    """Where choices change: kernels cut rows in eighths of 64 and wider."""
    yield from (m for m in (*range(1, 64), *range(64, 1024, 8), *range(1024, max_rows + 1, 32)) if m <= max_rows)


def _variants(
    layer: LinearShape, dtype: torch.dtype, max_rows: int, n_processors: int, alone: bool, rank: int,
    beside: Callable[[torch.dtype, int], _Variant] | None,
) -> Iterator[_Variant]:  # fmt: skip
    kind = Build(dtype, layer.residual, layer.bias, layer.wide)
    for m in _rows(max_rows):
        for norm in {layer.norm and m <= MAX_NORM_ROWS, False}:
            product = ProductShape(m, layer.n, layer.k, norm, layer.silu_mul)
            made = static_obstacle(product, dtype) or fastest(product, n_processors, alone)
            if not isinstance(made, str):
                yield variant_of(product, made, kind)
                if rank and takes_adapters(product, made):
                    yield variant_of(product, made, kind, {"RANK": rank})
                    if beside is not None:
                        yield beside(dtype, layer.k)
        product = ProductShape(m, layer.n, layer.k)
        if layer.sent_to and m >= MIN_SENT_ROWS and not static_obstacle(product, dtype):
            made = wide_plan(product, n_processors, alone=alone)
            yield variant_of(product, made, sent_build(dtype, layer.sent_to, layer.bias))
