"""Measures of how far outputs lie from those of float64, and the rows of the report.

Plain values and arithmetic. Owns no path that is measured (`attention.py`, `model.py`) and no layout (`report.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Value of --dtype → the type."""
BASELINE, FLASH, PEER, OURS, ROUNDED = "baseline", "flash", "peer", "ours", "rounded"
"""Kinds of paths: softmax written out in one type, tiles with every value in one type, torch's own, Quire's, and
Quire's with keys or weights of fewer bits than the type has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deviation:
    """Differences between outputs and the same outputs of float64. NaN where the outputs have one."""

    max_abs: float
    mean_abs: float
    wasserstein: float
    """Of the distributions of all numbers, see `wasserstein`."""
    best_agreement: float | None = None
    """Share of rows whose largest number stands in the same place; None where rows are not logits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One path on one input."""

    part: str
    """'attention', or 'model': the logits of all of it."""
    inputs: str
    """What it was given: 'random', 'layer 7', ..."""
    dtype: str
    path: str
    kind: str
    tile: str
    """How the work was cut: rows of queries, keys of a tile, pieces of the keys, tokens of a chunk."""
    length: int
    """Keys of the last row, or tokens of the prompt."""
    deviation: Deviation
    times_baseline: float | None = None
    """Mean difference over that of the baseline in the same rows; None for logits, and where the baseline's is 0."""


def deviation(got: torch.Tensor, exact: torch.Tensor, *, logits: bool = False) -> Deviation:
    """Of `got`, of any type, from `exact`, float64 of the same shape. logits: rows of the last dimension are logits."""
    wide = got.to(exact.device, torch.float64)
    apart = (wide - exact).abs()
    best = float((wide.argmax(-1) == exact.argmax(-1)).double().mean()) if logits else None
    return Deviation(float(apart.max()), float(apart.mean()), wasserstein(wide, exact), best)


def wasserstein(a: torch.Tensor, b: torch.Tensor) -> float:
    """The 1-Wasserstein distance of two samples of equally many numbers, each taken as a distribution on the line: the
    mean distance of the i-th smallest numbers. At most the mean difference.

    Golden et al. 2024 (arXiv 2405.02803) take it of the weights of two models; here it is taken of outputs.
    Raises ValueError for samples of different sizes.
    """
    if a.numel() != b.numel():
        raise ValueError(f"samples of {a.numel()} and {b.numel()} numbers: give equally many")
    # numpy sorts millions of numbers ten times as fast as torch does on a CPU
    first, second = (np.sort(x.detach().double().cpu().numpy(), axis=None) for x in (a, b))
    return float(np.abs(np.subtract(first, second, out=first), out=first).mean())
