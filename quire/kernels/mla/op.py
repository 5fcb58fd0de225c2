"""Public steps between the projections of latent attention and attention. Checks shapes, picks the implementation."""

from __future__ import annotations

import torch

from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant
from quire.kernels.kvstore import entry
from quire.kernels.selector import select


def store(
    lines: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    q: torch.Tensor,
    rotated: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    pages: torch.Tensor,
    cache_locs: torch.Tensor,
) -> None:
    """Norm and rotate the lines of tokens and write them into their entries; rotate the queries' part with a position.

    lines: [n, rank + d], last dimension contiguous: the first rank numbers are RMS normed with the weight norm [rank]
    (see kernels.norm), the last d rotated. q: [n, n_heads, d] → rotated, of the same shape; both of lines' dtype with a
    contiguous last dimension, the same tensor or apart from one another. positions: [n], int64 or int32. cos_sin:
    [max_pos, d] float32 as in kernels.qkv, the halves as pairs. pages: [n_pages, 1, page_size, rank + d] of lines'
    dtype, contiguous.
    cache_locs: [n] int64, page * page_size + offset, distinct except in the dummy page 0. Neither is range-checked.
    Raises ValueError on a mismatch.
    """
    _check(lines, norm, q, rotated, positions, cos_sin, pages, cache_locs)
    arguments = (lines, norm, eps, q, rotated, positions, cos_sin, pages, cache_locs)
    select("mla", "store", *arguments)(*arguments)


def ask(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What queries ask of lines, new [n, n_heads, rank + d] contiguous, and `store` of the tokens' lines.

    q: [n, n_heads, plain + d], last dimension contiguous. The first rank numbers of a result are q's plain ones times
    the head's matrix of keys [n_heads, plain, rank], the last d those of q rotated. Sums are in float32. The rest: see
    `store`. Raises ValueError on a mismatch.
    """
    rank = lines.shape[1] - cos_sin.shape[1]
    plain = q.shape[2] - cos_sin.shape[1] if q.dim() == 3 else 0
    if q.dim() != 3 or plain < 1 or keys.shape != (q.shape[1], plain, rank) or keys.dtype != q.dtype:
        raise ValueError(f"keys {_shape(keys)} must be [heads, plain, {rank}] of q's type, q {_shape(q)}")
    rotated = q[:, :, plain:]
    _check(lines, norm, rotated, rotated, positions, cos_sin, pages, cache_locs)
    arguments = (lines, norm, eps, q, keys, positions, cos_sin, pages, cache_locs)
    found: torch.Tensor = select("mla", "ask", *arguments)(*arguments)
    return found


def attend(
    asked: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant, matrices: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> torch.Tensor:  # fmt: skip
    """`values` of what attention makes of queries: new [n, n_heads, v], contiguous; padding rows hold anything.

    asked, k, v, plan, variant and scales: as in `attention.run`. matrices: [n_heads, v, rank], as in `values`. Raises
    ValueError on a mismatch, ConfigError when no implementation can run it.
    """
    n, width = plan.n_rows, (plan.heads.n_q_heads, plan.heads.head_dim)
    if len(asked) < n or asked.shape[1:] != width or asked.stride(2) != 1:
        raise ValueError(f"asked {_shape(asked)} does not fit a plan of {n} rows, {plan.heads}")
    size = entry.entry_size(width[1], k.dtype)
    if k.dim() != 4 or k.shape[1:] != (1, plan.page_size, size) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"lines {_shape(k)}, {_shape(v)} must be [n_pages, 1, {plan.page_size}, {size}], v a part of k"
        )
    _check_matrices(asked, plan.heads.out_dim, matrices)
    arguments = (asked, k, v, plan, variant, matrices, scales)
    found: torch.Tensor = select("mla", "attend", *arguments)(*arguments)
    return found


def values(seen: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Of each head what was seen of lines [n, n_heads, rank] times its matrix: new [n, n_heads, v], contiguous.

    matrices: [n_heads, v, rank] of seen's dtype, last dimension contiguous. Sums are in float32. Raises ValueError on a
    mismatch.
    """
    if seen.dim() != 3:
        raise ValueError(f"seen {_shape(seen)} must be [n, heads, rank]")
    _check_matrices(seen, seen.shape[2], matrices)
    found: torch.Tensor = select("mla", "values", seen, matrices)(seen, matrices)
    return found


def _check_matrices(rows: torch.Tensor, rank: int, matrices: torch.Tensor) -> None:
    """Of values, for rows [n, heads, ...]."""
    if matrices.dim() != 3 or (len(matrices), matrices.shape[2]) != (rows.shape[1], rank):
        raise ValueError(f"matrices {_shape(matrices)} must be [heads, v, rank]: {rows.shape[1]} heads, rank {rank}")
    if matrices.dtype != rows.dtype or matrices.stride(2) != 1:
        raise ValueError(f"matrices {_shape(matrices)} must be of {rows.dtype}, with a contiguous last dimension")


def _check(
    lines: torch.Tensor, norm: torch.Tensor, q: torch.Tensor, rotated: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> None:  # fmt: skip
    """Of `store`."""
    n, width = lines.shape
    d = cos_sin.shape[-1]
    if norm.shape != (width - d,) or q.dim() != 3 or q.shape[0] != n or q.shape[2] != d or rotated.shape != q.shape:
        raise ValueError(
            f"lines {_shape(lines)} are a norm's {_shape(norm)} and a rotation's {_shape(cos_sin)} numbers, as q "
            f"{_shape(q)} and rotated {_shape(rotated)} are [{n}, heads, {d}]"
        )
    if pages.dim() != 4 or pages.shape[1] != 1 or pages.shape[3] != width or not pages.is_contiguous():
        raise ValueError(f"pages {_shape(pages)} must be contiguous [n_pages, 1, page_size, {width}]")
    if any(one.dtype != lines.dtype for one in (norm, q, rotated, pages)):
        raise ValueError(f"norm, q, rotated and pages must be {lines.dtype}, as lines are")
    if positions.shape != (n,) or cache_locs.shape != (n,) or cache_locs.dtype != torch.int64:
        raise ValueError(f"positions {_shape(positions)} and cache_locs {_shape(cache_locs)} do not fit {n} lines")
    if any(one.stride(-1) != 1 for one in (lines, q, rotated)) or not cos_sin.is_contiguous():
        raise ValueError("the last dimension of lines, q and rotated must be contiguous, and cos_sin")


def _shape(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
