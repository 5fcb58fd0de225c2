"""A parameter that is neither a matrix nor a norm's."""

from __future__ import annotations

import torch

from quire.compute.layers.linear import Make
from quire.config.parameters import Tensor


class Parameter:
    """Numbers as they are in the checkpoint, in the model's dtype or in float32."""

    def __init__(self, make: Make, table: Tensor) -> None:
        self.table = table
        self.name = table.name
        self.value = make(*table.shape).float() if table.is_float32 else make(*table.shape)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; it has one part."""
        return {self.table.kind: self.value}
