"""Public step from the projections of latent attention to attention. Checks shapes and picks the implementation."""

from __future__ import annotations

import torch

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
    contiguous last dimension, apart from one another. positions: [n], int64 or int32. cos_sin: [max_pos, d] float32 as
    in kernels.qkv, the halves as pairs. pages: [n_pages, 1, page_size, rank + d] of lines' dtype, contiguous.
    cache_locs: [n] int64, page * page_size + offset, distinct except in the dummy page 0. Neither is range-checked.
    Raises ValueError on a mismatch.
    """
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
    arguments = (lines, norm, eps, q, rotated, positions, cos_sin, pages, cache_locs)
    select("mla", "store", *arguments)(*arguments)


def _shape(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
