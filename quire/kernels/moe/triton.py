"""Mixtures of experts on CUDA: the choice, in `triton_kernels`, and the launches of the products, in `triton_products`.

Rows for matrices in e4m3 are rounded, x before the first product and its results before the second.
Tokens are sorted by expert on the device: counted, then placed one behind another without padding; blocks of at most
`BM` of them, each of one expert, are multiplied by it. Grids are as large as any choice could need, and programs
without a block end at once.
"""

from __future__ import annotations

import dataclasses

import torch
import triton

from quire.config.experts import Gating, RoutingSpec, Scores
from quire.kernels import lora, nibbles
from quire.kernels.invariance import are_rows_alone
from quire.kernels.moe import triton_kernels as kernels
from quire.kernels.moe import triton_products as products
from quire.kernels.moe.adapted import ExpertAdapters
from quire.kernels.moe.coded import CodedMatrices, Codes, Matrices
from quire.kernels.w8a8.triton import round_rows

KEPT = {Codes.BYTES: products.BYTES, Codes.INT4: products.INT4, Codes.FP4: products.FP4}
PLACED = 1 << 15
"""Comparisons of assignments with experts that one program makes."""


def route(
    logits: torch.Tensor,
    routing: RoutingSpec,
    correction: torch.Tensor | None,
    load: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py."""
    n, n_experts = logits.shape
    expert_ids = torch.empty(n, routing.n_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(n, routing.n_chosen, dtype=torch.float32, device=logits.device)
    limited = routing.n_chosen_groups < routing.n_groups
    kernels.route[(n,)](
        logits, logits.stride(0), correction, load, expert_ids, weights, routing.scale, routing.mixer_margin,
        E=n_experts, E_PAD=triton.next_power_of_2(n_experts), K=routing.n_chosen,
        K_PAD=triton.next_power_of_2(routing.n_chosen), SIGMOID=routing.scores is Scores.SIGMOID,
        MIXER=routing.scores is Scores.SPARSE_MIXER, EVEN=routing.scores is Scores.EVEN,
        RENORMALISE=routing.renormalise, G=routing.n_groups if limited else 1,
        G_PAD=triton.next_power_of_2(routing.n_groups),
        G_CHOSEN=routing.n_chosen_groups, G_BEST=min(routing.n_group_best, n_experts // routing.n_groups),
        num_warps=1 if n_experts <= 256 else 4,
    )  # fmt: skip
    return expert_ids, weights


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gating: Gating,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py."""
    blocks = _sorted(expert_ids, down.shape[0], _block_rows(expert_ids.numel(), down.shape[0]))
    inner = _up(x, blocks, up, expert_ids.shape[1], gating, up_bias, None)
    each = _down(inner, blocks, down, weights, down_bias, None)
    return _sums(each, expert_ids, x, residual, out)


def adapted_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    adapters: ExpertAdapters,
    gating: Gating,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """See adapted.py. Assignments are sorted a second time, by adapter and expert, for the small products."""
    k, n_experts = expert_ids.shape[1], down.shape[0]
    blocks = _sorted(expert_ids, n_experts, _block_rows(expert_ids.numel(), n_experts))
    groups = _sorted(adapters.keys(expert_ids, n_experts), len(adapters.up.a), lora.TILE)
    tiles = lora.Tiles(groups.order, groups.table.t().contiguous())
    added = x.new_zeros(expert_ids.numel(), up.shape[1])
    given = x[:, None].expand(-1, k, -1).reshape(len(added), -1)  # a copy; repeat_interleave may ask the host
    lora.add(given, adapters.up, tiles, added)
    inner = _up(x, blocks, up, k, gating, up_bias, added)
    added = x.new_zeros(expert_ids.numel(), down.shape[1])
    lora.add(inner, adapters.down, tiles, added)
    each = _down(inner, blocks, down, weights, down_bias, added)
    return _sums(each, expert_ids, x, residual, None)


def _up(
    x: torch.Tensor, blocks: Blocks, up: Matrices, k: int, gating: Gating, bias: torch.Tensor | None,
    added: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Inner vectors, in the order of blocks; with added, in that of assignments."""
    inner_size, kept, tile, rows = up.shape[1] // 2, _Kept.of(up), _tile(blocks.n_rows, x.dtype, up), _Rows.of(x, up)
    inner = torch.empty(len(blocks.order), inner_size, dtype=x.dtype, device=x.device)
    products.up[(blocks.number * triton.cdiv(inner_size, tile.bn),)](
        rows.numbers, rows.numbers.stride(0), rows.scales, rows.step, blocks.table, blocks.number, blocks.order,
        kept.numbers, kept.scales, kept.factors, bias, added, inner, gating.slope, gating.offset, gating.limit,
        HIDDEN=x.shape[1], INNER=inner_size, K=k, LIMITED=gating.limit > 0, **kept.constants,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, num_warps=tile.n_warps, num_stages=tile.n_stages,
    )  # fmt: skip
    return inner


def _down(
    inner: torch.Tensor, blocks: Blocks, down: Matrices, weights: torch.Tensor, bias: torch.Tensor | None,
    added: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Weighed outputs of assignments."""
    hidden_size, kept, tile = down.shape[1], _Kept.of(down), _tile(blocks.n_rows, inner.dtype, down)
    rows = _Rows.of(inner, down)
    each = torch.empty(len(inner), hidden_size, dtype=inner.dtype, device=inner.device)
    products.down[(blocks.number * triton.cdiv(hidden_size, tile.bn),)](
        rows.numbers, rows.numbers.stride(0), rows.scales, rows.step, blocks.table, blocks.number, blocks.order,
        kept.numbers, kept.scales, kept.factors, bias, added, weights, each,
        HIDDEN=hidden_size, INNER=inner.shape[1], **kept.constants,
        BM=tile.bm, BN=tile.bn, BK=tile.bk, num_warps=tile.n_warps, num_stages=tile.n_stages,
    )  # fmt: skip
    return each


def _sums(
    each: torch.Tensor, expert_ids: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Of the outputs of each token, as `experts` returns them."""
    (n, k), hidden_size = expert_ids.shape, x.shape[1]
    y = torch.empty_like(x) if out is None and residual is None else residual if out is None else out
    assert y is not None
    kernels.add[(n, triton.cdiv(hidden_size, 1024))](
        each, expert_ids, y, y.stride(0), HIDDEN=hidden_size, K=k, ADDS=residual is not None, BLOCK=1024, num_warps=4
    )
    return y


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Assignments of tokens to experts, sorted by expert. An assignment is its number in expert_ids."""

    number: int
    """Of blocks, at most; those without rows are the last."""
    n_rows: int
    """Of a block, at most."""
    table: torch.Tensor
    """[3, number] int32: the expert, the place of the first row, how many rows."""
    order: torch.Tensor
    """[n * k] int32: place → assignment."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What a program multiplies."""

    bm: int
    bn: int
    bk: int
    n_warps: int
    n_stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """What is multiplied by matrices: as it is, or in e4m3."""

    numbers: torch.Tensor
    scales: torch.Tensor | None = None
    """float32: [rows], or in blocks [ceil(k / 128), rows]."""

    @classmethod
    def of(cls, x: torch.Tensor, matrices: Matrices) -> _Rows:
        if not (isinstance(matrices, CodedMatrices) and matrices.rounds_inputs):
            return cls(x)
        rounded = round_rows(x, matrices.codes.dtype, matrices.group > 0, None)
        return cls(rounded.codes, rounded.scales)

    @property
    def step(self) -> int:
        """From the scales of one group of columns to those of the next."""
        return 0 if self.scales is None else self.scales.shape[-1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A matrix of each expert as the kernels are given it."""

    numbers: torch.Tensor
    scales: torch.Tensor | None
    factors: torch.Tensor | None
    constants: dict[str, int]

    @classmethod
    def of(cls, matrices: Matrices) -> _Kept:
        if isinstance(matrices, torch.Tensor):
            constants = {"KEPT": 0, "GROUP": 0, "ZEROS": False, "MATRIX": matrices[0].numel(), "SCALES": 0}
            return cls(matrices, None, None, constants)
        kept = (products.E4M3 if matrices.rounds_inputs else KEPT[matrices.kind]).value
        group = matrices.group if matrices.kind is Codes.BYTES else matrices.group or matrices.k
        constants = {
            "KEPT": kept, "GROUP": group, "ZEROS": matrices.has_zeros,
            "MATRIX": matrices.codes[0].numel(), "SCALES": matrices.scales[0].numel(),
        }  # fmt: skip
        return cls(matrices.codes, matrices.scales, matrices.factors, constants)


def _block_rows(n_assigned: int, n_experts: int) -> int:
    """Of one number for all batches, where rows must not depend on them."""
    if are_rows_alone():
        return 64
    even: int = triton.next_power_of_2(n_assigned // n_experts)
    return min(128, max(16, even))


def _tile(n_rows: int, dtype: torch.dtype, matrices: Matrices | None = None) -> Tile:
    in_words = isinstance(matrices, CodedMatrices) and matrices.kind is not Codes.BYTES
    if isinstance(matrices, CodedMatrices) and matrices.rounds_inputs:
        dtype = matrices.codes.dtype
    bk = nibbles.BLOCK if in_words else 128 // dtype.itemsize
    return Tile(n_rows, 64, bk, 8 if n_rows > 64 else 4, 4 if n_rows < 128 else 3)


def _sorted(expert_ids: torch.Tensor, n_experts: int, n_rows: int) -> Blocks:
    n_assigned, device = expert_ids.numel(), expert_ids.device
    number = min(n_assigned, triton.cdiv(n_assigned, n_rows) + n_experts)
    counts = torch.zeros(n_experts, dtype=torch.int32, device=device)
    ranks = torch.empty(n_assigned, dtype=torch.int32, device=device)
    kernels.count[(triton.cdiv(n_assigned, 256),)](expert_ids, counts, ranks, n_assigned, BLOCK=256, num_warps=4)
    table = torch.empty(3, number, dtype=torch.int32, device=device)
    order = torch.empty(n_assigned, dtype=torch.int32, device=device)
    e_pad = triton.next_power_of_2(n_experts)
    block = max(16, PLACED // e_pad)
    kernels.place[(triton.cdiv(n_assigned, block),)](
        expert_ids, counts, ranks, table, order, n_assigned, number,
        E=n_experts, E_PAD=e_pad, BM=n_rows, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return Blocks(number, n_rows, table, order)
