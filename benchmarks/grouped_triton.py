"""A grouped product in Triton as other engines have it: the peer of `grouped_product`, with a sweep of its tiles.

Pairs of a token and an expert are sorted by expert and padded to whole blocks beforehand (`Padded`), untimed. A program
has BM of them and BN columns; programs near in time share blocks and columns (`group`). Written after the
matrix product of Triton's tutorials, with the gather and the padding that fused experts of vLLM and SGLang have.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies."""

    bm: int
    bn: int
    group: int
    n_warps: int
    n_stages: int


TILES: Final = (
    *(Tile(128, 128, group, 8, 3) for group in (1, 16)), *(Tile(128, 128, group, 4, 4) for group in (1, 16)),
    *(Tile(128, 256, group, 8, n_stages) for group in (1, 16) for n_stages in (3, 4)),
    Tile(64, 128, 1, 4, 4), Tile(64, 256, 1, 8, 4), Tile(64, 256, 16, 4, 3), Tile(32, 128, 1, 4, 4),
    Tile(16, 128, 1, 4, 4), Tile(16, 64, 1, 4, 5),
)  # fmt: skip
"""What tuned tables choose from: blocks of 64 columns to sum over suit all of them."""


@triton.jit(do_not_specialize=["n_pairs", "each", "n_blocks", "group"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, w, y, order, experts, n_pairs, each, n_blocks, n, k, group,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y [pairs, n]: rows of x [pairs / each, k] times those of their expert's w [n, k]."""
    program, n_columns = tl.program_id(0), tl.cdiv(n, BN)
    first = program // (group * n_columns) * group
    size = tl.minimum(n_blocks - first, group)
    block, column = first + program % (group * n_columns) % size, program % (group * n_columns) // size
    pairs = tl.load(order + block * BM + tl.arange(0, BM))
    is_real = pairs < n_pairs
    columns, ks = column * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = x + (pairs // each).to(tl.int64)[:, None] * k + ks[None, :]
    b = w + tl.load(experts + block).to(tl.int64) * n * k + columns.to(tl.int64)[None, :] * k + ks[:, None]
    sums = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, k, BK):
        sums = tl.dot(tl.load(a, mask=is_real[:, None], other=0.0), tl.load(b), sums)
        a += BK
        b += BK
    to = y + pairs.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=is_real[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _silu(both, inner, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * SIZE + column).to(tl.float32)
    up = tl.load(both + row * 2 * SIZE + SIZE + column).to(tl.float32)
    tl.store(inner + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty))


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """Pairs in the order of their experts, those of each filled up to whole blocks."""

    order: torch.Tensor
    """[blocks * bm] int32; n_pairs: none."""
    experts: torch.Tensor
    """[blocks] int32."""

    @classmethod
    def of(cls, expert_ids: torch.Tensor, n_experts: int, bm: int) -> Padded:
        """Reads the ids on the host."""
        ids = expert_ids.flatten().cpu()
        parts, experts = [], []
        for expert in range(n_experts):
            own = (ids == expert).nonzero()[:, 0].int()
            n_blocks = triton.cdiv(len(own), bm)
            parts.append(torch.nn.functional.pad(own, (0, n_blocks * bm - len(own)), value=len(ids)))
            experts += [expert] * n_blocks
        device = expert_ids.device
        return cls(torch.cat(parts).to(device), torch.tensor(experts, dtype=torch.int32, device=device))


def product(x: torch.Tensor, w: torch.Tensor, pairs: Padded, each: int, tile: Tile, n_pairs: int) -> torch.Tensor:
    """[n_pairs, n]: a row of x stands for `each` pairs. w: [experts, n, k]; n is a multiple of tiles, k of 64."""
    n_blocks, n = len(pairs.experts), w.shape[1]
    y = torch.empty(n_pairs, n, dtype=x.dtype, device=x.device)
    _product[(n_blocks * triton.cdiv(n, tile.bn),)](
        x, w, y, pairs.order, pairs.experts, n_pairs, each, n_blocks, n, w.shape[2], tile.group,
        BM=tile.bm, BN=tile.bn, BK=64, num_warps=tile.n_warps, num_stages=tile.n_stages,
    )  # fmt: skip
    return y


def silu(both: torch.Tensor) -> torch.Tensor:
    """[pairs, n / 2]: gates beside ups."""
    n_pairs, size = both.shape[0], both.shape[1] // 2
    inner = torch.empty(n_pairs, size, dtype=both.dtype, device=both.device)
    _silu[(n_pairs, size // 128)](both, inner, SIZE=size, BLOCK=128)
    return inner
