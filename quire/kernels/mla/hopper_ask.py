"""`ask` in one launch for few rows on Hopper (csrc/cuda/latent_rows.cu)."""

from __future__ import annotations

import torch

from quire.kernels.mla import hopper
from quire.kernels.mla.hopper import PLAIN, RANK, ROPE


def static_obstacle(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> str | None:  # fmt: skip
    """Why no machine could run this with the kernel, or None."""
    sizes = len(norm), cos_sin.shape[1], keys.shape[1]
    if sizes != (RANK, ROPE, PLAIN):
        return f"lines of {sizes[0]} + {sizes[1]} and keys of {sizes[2]} numbers are not {RANK} + {ROPE} and {PLAIN}"
    if cos_sin.dtype is not torch.float32 or not len(cos_sin) or positions.dtype not in (torch.int64, torch.int32):
        return f"cos_sin is {cos_sin.dtype} and positions are {positions.dtype}: it must be float32, int64 or int32"
    if keys.stride(1) != RANK or hopper.apart(lines, norm, q, keys, pages) or cos_sin.data_ptr() % 16:
        return "an address or a row is not at a multiple of 16 bytes, or the rows of a head of keys are apart"
    return hopper.rows_obstacle(len(lines), lines.dtype)


def obstacle(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> str | None:  # fmt: skip
    """Why the kernel does not take these arguments here, or None. The first call for a type may compile."""
    found = static_obstacle(lines, norm, eps, q, keys, positions, cos_sin, pages, cache_locs)
    return found or hopper.built(lines.dtype)


def ask(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    n, n_heads, _ = q.shape
    asked = torch.empty(n, n_heads, RANK + ROPE, dtype=q.dtype, device=q.device)
    pointers = (lines, norm, q, keys, asked, pages, positions, cos_sin, cache_locs)
    args = hopper.AskArgs(
        *(one.data_ptr() for one in pointers), lines.stride(0), q.stride(0), q.stride(1), keys.stride(0),
        n, n_heads, len(cos_sin), positions.dtype is torch.int64, eps,
    )  # fmt: skip
    hopper.launch("quire_latent_ask", lines, args)
    return asked
