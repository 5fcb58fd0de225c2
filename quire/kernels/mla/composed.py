"""Torch's products for each head, `store`, attention and `values`, in turn, on any device."""

from __future__ import annotations

import torch

from quire.kernels import attention
from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant
from quire.kernels.kvstore import entry
from quire.kernels.selector import select


def ask(
    lines: torch.Tensor, norm: torch.Tensor, eps: float, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, pages: torch.Tensor, cache_locs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    plain, rank = keys.shape[1:]
    asked = q.new_empty(*q.shape[:2], lines.shape[1])
    torch.bmm(q[:, :, :plain].transpose(0, 1), keys, out=asked[:, :, :rank].transpose(0, 1))
    given = (lines, norm, eps, q[:, :, plain:], asked[:, :, rank:], positions, cos_sin, pages, cache_locs)
    select("mla", "store", *given)(*given)
    return asked


def attend(
    asked: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, variant: Variant, matrices: torch.Tensor,
    scales: entry.Scales = entry.UNIT,
) -> torch.Tensor:  # fmt: skip
    """See op.py."""
    seen = attention.run(asked, k, v, plan, variant, scales=scales)
    return select("mla", "values", seen, matrices)(seen, matrices)  # type: ignore[no-any-return]


def values(seen: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """See op.py."""
    y = seen.new_empty(*seen.shape[:2], matrices.shape[1])
    torch.bmm(seen.transpose(0, 1), matrices.transpose(1, 2), out=y.transpose(0, 1))
    return y
