"""GPTQ (Frantar et al. 2022, algorithm 1): columns are rounded one after another, and those to come make up for it.

Owns the order and the feedback. Does not own numbers (`grid`). Computes in the dtype of its inputs.
"""

from __future__ import annotations

from typing import Final

import torch

from quire.compute.quantize.grid import Grid, Rounded
from quire.core.errors import ConfigError

BLOCK: Final = 128
"""Columns whose feedback to later ones is one product."""


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, *, damping: float = 0.01, act_order: bool = False
) -> Rounded:
    """weight: [n, k]; hessian: [k, k], X^T X of the inputs, left as it is.

    act_order: columns in the order of falling diagonal; scales of groups are those of the whole matrix then, so that
    columns are stored where they were ("static groups"). Else the scale of a group is of what the group is when its
    turn comes. Raises ConfigError where the damped Hessian has no inverse.
    """
    k = weight.shape[1]
    group = grid.form.group
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else None
    w = weight.clone() if order is None else weight[:, order]
    factor = _factor(hessian if order is None else hessian[order][:, order], damping)
    scales = grid.scales(weight)
    wide = grid.of_columns(scales, k)
    if order is not None:
        wide = wide[:, order]
    codes = torch.empty_like(w)
    step = group if group and order is None else BLOCK
    for first in range(0, k, step):
        columns = slice(first, min(first + step, k))
        if group and order is None:
            scales[:, first // group : first // group + 1] = grid.scales(w[:, columns])
            wide[:, columns] = scales[:, first // group, None]
        errors = _round_block(w[:, columns], factor[columns, columns], wide[:, columns], grid, codes[:, columns])
        w[:, columns.stop :] -= errors @ factor[columns, columns.stop :]
    if order is not None:
        codes = codes[:, order.argsort()]
    return Rounded(grid, codes, scales)


def _round_block(
    w: torch.Tensor, factor: torch.Tensor, scales: torch.Tensor, grid: Grid, codes: torch.Tensor
) -> torch.Tensor:
    """Round w [n, m] into codes, with feedback inside; returns errors [n, m], each over its diagonal."""
    errors = torch.empty_like(w)
    for j in range(w.shape[1]):
        codes[:, j] = grid.codes(w[:, j], scales[:, j])
        errors[:, j] = (w[:, j] - grid.dequantised(codes[:, j], scales[:, j])) / factor[j, j]
        w[:, j:] -= errors[:, j, None] * factor[j, j:]
    return errors


def _factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian. Inputs that never were there count as ordinary."""
    diagonal = hessian.diagonal()
    damped = hessian.clone()
    damped.diagonal()[diagonal == 0] = 1.0
    damped.diagonal().add_(damping * float(diagonal.mean()))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if not int(failed):
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed):
        raise ConfigError(
            f"the Hessian of {len(hessian):,} inputs has no inverse with --damping {damping:g}: take more text, or a"
            f" larger --damping, as {min(1.0, 10 * damping):g}"
        )
    found: torch.Tensor = upper
    return found
