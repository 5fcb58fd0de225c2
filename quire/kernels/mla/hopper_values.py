"""`values` for few rows on Hopper (csrc/cuda/latent_rows.cu)."""

from __future__ import annotations

import torch

from quire.kernels.attention.hopper import launcher
from quire.kernels.mla import hopper
from quire.kernels.mla.hopper import PLAIN, RANK


def static_obstacle(seen: torch.Tensor, matrices: torch.Tensor) -> str | None:
    """Why no machine could run this with the kernel, or None."""
    if matrices.shape[1:] != (PLAIN, RANK):
        return f"values are {matrices.shape[1]} numbers of {matrices.shape[2]}, not {PLAIN} of {RANK}"
    if matrices.stride(1) != RANK or not seen.is_contiguous() or hopper.apart(seen, matrices):
        return "an address is not a multiple of 16 bytes, or rows of seen or of a head's matrix are apart"
    return hopper.rows_obstacle(len(seen), seen.dtype)


def obstacle(seen: torch.Tensor, matrices: torch.Tensor) -> str | None:
    """Why the kernel does not take these arguments here, or None. The first call for a type may compile."""
    return static_obstacle(seen, matrices) or hopper.built(seen.dtype)


def values(seen: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    return values_of(seen, matrices, None)


def values_of(seen: torch.Tensor, matrices: torch.Tensor, parts: launcher.Args | None) -> torch.Tensor:
    """The same. parts: what attention was told, whose parts of lines that were split are not in seen yet."""
    n, n_heads, _ = seen.shape
    y = torch.empty(n, n_heads, PLAIN, dtype=seen.dtype, device=seen.device)
    pointers = (one.data_ptr() for one in (seen, matrices, y))
    args = hopper.ValuesArgs(*pointers, matrices.stride(0), n, n_heads)
    hopper.launch("quire_latent_values", seen, args, parts)
    return y
