"""Products with adapters in plain torch: the oracle, in float64, rounded once."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.act.reference import silu_mul
from quire.kernels.gemm import Norm
from quire.kernels.lora.places import Places
from quire.kernels.lora.weight import Stack, Tiles
from quire.kernels.norm import reference as norm_reference

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
        has = count and place >= 0
        for part, (size, rank) in enumerate(zip(stack.sizes, ranks[place], strict=True) if has else ()):
            a = stack.a[place, part * stack.most : part * stack.most + rank]
            if rank:
                _add(x, rows, a, stack.b[place, start : start + size, :rank], y[:, start : start + size], norm)
            start += size
    if activated is not None:
        activated.copy_(silu_mul(y))


def add_lines(x: torch.Tensor, adapters: Places, places: np.ndarray, y: torch.Tensor, norm: Norm | None = None) -> None:
    """See op.py."""
    for place in sorted({*places.tolist()} - {-1}):
        rows = torch.from_numpy(np.flatnonzero(places == place))
        lines = adapters[place]
        for part in () if lines is None else lines.parts:
            assert lines is not None
            a = lines.matrix[part.first : part.first + part.rank]
            _add(x, rows, a, part.matrix, y[:, part.start : part.start + part.n], norm)


def _add(
    x: torch.Tensor, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, norm: Norm | None
) -> None:
    found = x[rows].double()
    if norm is not None:
        found = norm_reference.rms_norm(found, norm[0].double(), norm[1])
    y[rows] = (y[rows].double() + found @ a.double().T @ b.double().T).to(y.dtype)
