"""Products with adapters in plain torch: the oracle, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.act.reference import silu_mul
from quire.kernels.gemm import Norm
from quire.kernels.lora.weight import Groups, Packed, Stack, Tiles
from quire.kernels.norm import reference as norm_reference
from quire.kernels.qgemm.weight import unpack_floats

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""dtype → largest |kernel - reference| / (1 + |reference|) for outputs of unit variance."""


def add(
    x: torch.Tensor, stack: Stack, tiles: Tiles, y: torch.Tensor, norm: Norm | None = None,
    activated: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """See op.py."""
    order, ranks = tiles.order.tolist(), stack.ranks.tolist()
    for place, first, count in tiles.tiles.tolist():
        rows = torch.tensor(order[first : first + count], dtype=torch.int64, device=x.device)
        start = 0
        for part, (size, rank) in enumerate(zip(stack.sizes, ranks[place], strict=True) if place >= 0 else ()):
            a = stack.a[place, part * stack.most : part * stack.most + rank]
            if count and rank:
                _add(x, rows, a, stack.b[place, start : start + size, :rank], y[:, start : start + size], norm)
            start += size
    if activated is not None:
        activated.copy_(silu_mul(y))


def add_packed(
    x: torch.Tensor, adapters: Sequence[Packed | None], groups: Groups, y: torch.Tensor, norm: Norm | None = None
) -> None:
    """See op.py."""
    order = torch.arange(len(x)) if groups.order is None else groups.order
    for place, at, until in groups.spans:
        one, rows = adapters[place], order[at:until]
        for first, last, start, end, b in () if one is None else one.parts:
            assert one is not None
            _add(x, rows, unpack_floats(one.a)[first:last], unpack_floats(b), y[:, start:end], norm)


def _add(
    x: torch.Tensor, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, norm: Norm | None
) -> None:
    found = x[rows].double()
    if norm is not None:
        found = norm_reference.rms_norm(found, norm[0].double(), norm[1])
    y[rows] = (y[rows].double() + found @ a.double().T @ b.double().T).to(y.dtype)
