"""2:4 sparsity: of four neighbouring values of a row two become zero, those with the smaller scores.

Owns the choice. Scores are |w| (magnitude), or |w| times the norm of its input (Wanda, Sun et al. 2023, eq. 1).
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """A matrix with zeros, stored as any other."""

    matrix: torch.Tensor
    """[n, k]."""


def two_of_four(weight: torch.Tensor, norms: torch.Tensor | None = None) -> Pruned:
    """weight: [n, k], k a multiple of 4. norms: [k], of the inputs; None: all alike."""
    scores = weight.abs() if norms is None else weight.abs() * norms
    groups = scores.unflatten(1, (-1, 4))  # type: ignore[no-untyped-call]
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, groups.topk(2, dim=2).indices, True)
    return Pruned(weight * kept.flatten(1))
