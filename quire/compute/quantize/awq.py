"""AWQ (Lin et al. 2023, section 3.2): inputs with large values are scaled up in the matrix and down before it.

Owns the search of the scales. Does not own where the scale goes before the matrix (`folds`), nor numbers (`grid`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from quire.compute.quantize.grid import Grid, nearest

N_STEPS: Final = 20
"""Exponents tried: 0, 1/20, ... 19/20; the first scales nothing."""
LEAST: Final = 1e-4
"""Of the mean magnitude: an input that is never there is not divided by nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """A matrix that reads the inputs in question."""

    weight: torch.Tensor
    """[n, k]."""
    hessian: torch.Tensor
    """[k, k]: X^T X of its inputs."""


def best_scales(readers: Sequence[Reader], magnitudes: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, float]:
    """([k] factors of the inputs, the exponent): those with the least squared error of all outputs together.

    magnitudes: [k], mean |x| of each input; inputs with the same magnitude get the same factor.
    """
    size = magnitudes.clamp(min=LEAST * float(magnitudes.mean()) or 1.0)
    best, best_error, exponent = torch.ones_like(size), float("inf"), 0.0
    for step in range(N_STEPS):
        factors = size ** (step / N_STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = sum(_error(reader, factors, grid) for reader in readers)
        if error < best_error:
            best, best_error, exponent = factors, error, step / N_STEPS
    return best, exponent


def _error(reader: Reader, factors: torch.Tensor, grid: Grid) -> float:
    """Squared error of the outputs of a matrix that is rounded with its inputs scaled."""
    difference = nearest(reader.weight * factors, grid).matrix / factors - reader.weight
    return float(((difference @ reader.hessian) * difference).sum())
