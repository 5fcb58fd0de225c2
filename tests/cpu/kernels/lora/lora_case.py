"""Random adapters of one matrix, in both layouts, and rows that have them."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.kernels import lora
from quire.kernels.lora import reference
from quire.kernels.lora.weight import blocks_of, most_tiles


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """ranks: of each place, of each part."""

    k: int
    sizes: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    norm: bool = False
    seed: int = 0


class Made:
    """What a case is made of. x and y have longer rows than they show."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        n, n_parts, n_out = len(case.places), len(case.sizes), sum(case.sizes)
        most, self.places = max(map(max, case.ranks)), np.array(case.places, np.int32)
        self.x, self.y = randn(n, case.k + 8)[:, : case.k], randn(n, n_out + 8)[:, :n_out]
        self.norm = (1 + 0.1 * randn(case.k), 1e-5) if case.norm else None
        a, b = torch.zeros(len(case.ranks), n_parts * most, case.k), torch.zeros(len(case.ranks), n_out, most)
        a, b = a.to(case.dtype), b.to(case.dtype)
        self.lines = lora.Places(len(case.ranks), n_out, case.k)
        for place, ranks in enumerate(case.ranks):
            parts, start = [], 0
            for part, (size, rank) in enumerate(zip(case.sizes, ranks, strict=True)):
                if rank:
                    one, other = randn(rank, case.k) / case.k**0.5, randn(size, rank) / rank**0.5
                    a[place, part * most : part * most + rank], b[place, start : start + size, :rank] = one, other
                    parts.append((start, one, other))
                start += size
            self.lines.put(place, lora.Lines.of(parts, case.dtype) if parts else None)
        blocks = torch.tensor(blocks_of(case.sizes), dtype=torch.int32)
        self.stack = lora.Stack(a, b, torch.tensor(case.ranks, dtype=torch.int32), blocks, case.sizes)

    def tiles(self, places: np.ndarray) -> lora.Tiles:
        order, tiles = lora.tiles_of(places, most_tiles(len(places), len(self.lines)))
        return lora.Tiles(torch.from_numpy(order), torch.from_numpy(tiles))

    def expected(self) -> torch.Tensor:
        y = self.y.clone()
        reference.add(self.x, self.stack, self.tiles(self.places), y, self.norm)
        return y


MIXED = Case(
    k=96, sizes=(64, 32, 32), ranks=((4, 4, 4), (16, 0, 3), (0, 5, 0), (0, 0, 0)),
    places=(1, -1, 0, 2, 1, 1, -1, 3, 0, *[2] * 20),
)  # fmt: skip
CASES = (
    MIXED,
    dataclasses.replace(MIXED, norm=True, seed=1),
    Case(k=1100, sizes=(200,), ranks=((40,), (7,)), places=(1, 0, 0, -1), norm=True, seed=2),
    Case(k=64, sizes=(48, 48), ranks=((8, 8),), places=(0,) * 37, dtype=torch.float16, norm=True, seed=3),
)
ACTIVATED = (
    Case(
        k=700, sizes=(300, 300), ranks=((5, 5), (0, 20), (9, 0)), places=(1, -1, 0, 2, -1, *[2] * 20), norm=True, seed=6
    ),
    Case(k=64, sizes=(48, 48), ranks=((8, 8),), places=(0,) * 21 + (-1,), dtype=torch.float16, seed=7),
)
"""Of gates and ups."""
