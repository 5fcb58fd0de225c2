"""Random weights of realistic scale, for speed measurements without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

SCALE: Final = 0.02
"""Standard deviation of matrices, as models are initialised."""


def fill_random(weights: Iterable[tuple[str, torch.Tensor]], seed: int, device: torch.device) -> None:
    """Fill each parameter where it lives: normal(0, SCALE), norms normal(1, SCALE).

    weights: (name, tensor on `device`), in an order that decides the values. Same seed and device, same weights.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in weights:
        tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, SCALE, generator=generator)
