"""`attend` for few rows on Hopper, without the launch that sums the parts of lines: the values' kernel does it
(csrc/cuda/latent.cu, latent_rows.cu)."""

from __future__ import annotations

from typing import Final

import torch

from quire.kernels.attention.hopper import latent
from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant
from quire.kernels.catalog import Slower
from quire.kernels.kvstore import entry
from quire.kernels.mla import hopper, hopper_values
from quire.kernels.mla.hopper import PLAIN, RANK

MAX_ROWS: Final = 8
"""Of more rows too few blocks read the parts, and send their sums to one: a launch of sums and tiles are faster."""


def static_obstacle(
    asked: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant, matrices: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> str | None:  # fmt: skip
    """Why no machine could run this so, or None."""
    if not 1 <= len(asked) <= MAX_ROWS or plan.spans.trees is not None or not plan.work.n_merges:
        return Slower(
            f"{len(asked)} rows: launches apart from {MAX_ROWS + 1} on, for trees, and where no line is split"
        )
    if matrices.shape[1:] != (PLAIN, RANK) or matrices.stride(1) != RANK or hopper.apart(matrices):
        return f"values {tuple(matrices.shape)} are not {PLAIN} of {RANK} with rows of 16 bytes, close to one another"
    return hopper.rows_obstacle(len(asked), asked.dtype) or latent.static_obstacle(plan, variant, asked.dtype, k.dtype)


def obstacle(
    asked: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant, matrices: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> str | None:  # fmt: skip
    """Why this machine does not run it so, or None. The first call for a type may compile."""
    return (
        static_obstacle(asked, k, v, plan, variant, matrices, scales)
        or latent.obstacle(plan, variant, asked.dtype, k.dtype)
        or hopper.built(asked.dtype)
    )


def attend(
    asked: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant, matrices: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    seen = torch.empty(*asked.shape[:2], RANK, dtype=asked.dtype, device=asked.device)
    args = latent.run_without_merge(asked, k, v, plan, variant, seen)
    return hopper_values.values_of(seen, matrices, args)
