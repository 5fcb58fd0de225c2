"""How weights are rounded to 8 or 4 bits, in plain torch: the oracle of csrc/cpu/pack.cpp, used if that is not built.

Owns the numbers of `CODEBOOK` and the search for scales; does not own where codes lie in memory (`weight.py`).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F

CODEBOOK: Final = (-127, -89, -68, -52, -38, -27, -17, -7, 3, 13, 24, 36, 49, 65, 85, 112)
"""What the 16 codes of 4 bits stand for, ascending; times a group's scale they are weights.

Levels that are dense where weights are, as in NF4 (Dettmers et al., 2023, QLoRA, section 3), but fitted to the error
that remains: they minimise the squared error of groups of 64 drawn from Student's t with 10 degrees of freedom, with
the search of `best_scales` (Lloyd, 1982, alternating: scales and codes for the levels, levels for them; then the
largest is made 127). Trained weights lie between the normal distribution and t with 5 degrees. As a scale may be
negative, the ends differ.
"""
FACTORS: Final = (0.8, 0.9, 1.0)
"""Of the scale that maps a group's largest weight to an end of the codebook."""
STEPS: Final = (0.05, 0.025)
"""Then up and down from the best scale so far."""
LEAST: Final = 2.0**-83
"""Largest magnitude that a matrix with groups must have: from there on the least float16, 2**-24, is a normal float32
in units of `unit_of`, and so is its inverse."""


def nearest(values: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Index of the nearest of the ascending numbers `codebook`, the lower one half way between two: int64."""
    return torch.bucketize(values, (codebook[:-1] + codebook[1:]) / 2)


def best_scales(groups: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """groups: float32 [..., group] → [...]: of the scales tried the one with the least squared error.

    Tried are: the value of largest magnitude lies at the first or the last level, times each of `FACTORS`; then steps
    from the best. So small weights may be nearer to levels at the cost of the largest, which is clamped.
    """
    least, most = groups.aminmax(dim=-1)
    big = torch.where(-least > most, least, most)
    found = torch.zeros_like(big), torch.full_like(big, torch.inf)
    for end in (codebook[0], codebook[-1]):
        for factor in FACTORS:
            found = _better(found, (factor / end).expand_as(big), big, groups, codebook)
    for step in STEPS:
        start = found[0]
        for factor in (1 + step, 1 - step):
            found = _better(found, start * factor, big, groups, codebook)
    return big * found[0]


def _better(
    found: tuple[torch.Tensor, torch.Tensor],
    ratio: torch.Tensor,
    big: torch.Tensor,
    groups: torch.Tensor,
    codebook: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """found: the best scales over `big`, and their errors; with `ratio` in their place where its error is less."""
    u = groups * inverse(big * ratio)[..., None]
    error = (u - codebook[nearest(u, codebook)]).square().sum(-1) * ratio.square()
    return torch.where(error < found[1], ratio, found[0]), torch.minimum(error, found[1])


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 for 0."""
    return torch.where(scales == 0, 0.0, 1 / scales)


def whole_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, k] → integers in -127..127 and float32 scales [n], each row's largest magnitude over 127."""
    scales = rows.abs().amax(-1) / 127
    divided = rows / torch.where(scales == 0, 1.0, scales)[:, None]
    return divided.round_().clamp_(-127, 127), scales


def grouped(rows: torch.Tensor, bits: int, group: int, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, k] → codes [n, k padded], fitted to the float16 scales [n, groups], which are in `unit`.

    8 bits: integers in -127..127, the largest magnitude of a group is 127. 4 bits: indices into `CODEBOOK`.
    """
    last = rows.shape[1] // group * group
    parts = [_rounded(part, bits, unit) for part in rows[:, :last].split(group, 1) if part.numel()]  # type: ignore[no-untyped-call]
    if last < rows.shape[1]:
        parts.append(_rounded(rows[:, last:], bits, unit))
    codes = torch.cat([part for part, _ in parts], dim=1)
    return F.pad(codes, (0, -codes.shape[1] % group)), torch.stack([scales for _, scales in parts], dim=1)


def _rounded(groups: torch.Tensor, bits: int, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One group a row: codes [n, group] and scales [n]."""
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127 / unit).half()
        wide = scales.float() * unit
        return (groups / torch.where(wide == 0, 1.0, wide)[:, None]).clamp_(-127, 127).round_(), scales
    codebook = torch.tensor(CODEBOOK, dtype=torch.float32)
    scales = (best_scales(groups, codebook) / unit).half()
    return nearest(groups * inverse(scales.float() * unit)[:, None], codebook), scales


def unit_of(largest: float) -> float:
    """The power of two in which scales of a matrix with this largest magnitude are float16 without loss of range.

    largest: 0 or at least `LEAST`.
    """
    return 2.0 ** (math.frexp(largest)[1] - 20)
