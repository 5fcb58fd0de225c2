"""Linear layers: one matrix product for several projections that read the same input.

Owns the parameters and their split into the checkpoint's parts; does not own their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

Make = Callable[..., torch.Tensor]
"""`make(*shape)`: an uninitialised tensor of the model's dtype, where the model lives."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. x: [n, k], weight: [m, k], bias: [m]; returns [n, m], all of one dtype."""
    return F.linear(x, weight, bias)


class Linear:
    """y = x @ weight.T + bias, where the rows of `weight` are several projections under one another."""

    def __init__(self, make: Make, in_size: int, out_sizes: Sequence[int], *, bias: bool = False) -> None:
        self.out_sizes = tuple(out_sizes)
        self.weight = make(sum(out_sizes), in_size)
        self.bias = make(sum(out_sizes)) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, in_size] → [n, sum(out_sizes)]."""
        return linear(x, self.weight, self.bias)

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """The parameters of projection `index`, by their kind in the checkpoint: contiguous views to copy into."""
        tensors = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        return {kind: tensor.split(self.out_sizes)[index] for kind, tensor in tensors.items()}


class Embedding:
    """A table of one row a token id; when tied it is the head's matrix too."""

    def __init__(self, make: Make, n_rows: int, size: int) -> None:
        self.weight = make(n_rows, size)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [n] int32 or int64, each < n_rows → [n, size]."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [m, size] → [m, n_rows], float32 (computed in the model's dtype, as transformers does)."""
        return linear(hidden, self.weight).float()

    def part(self, index: int) -> dict[str, torch.Tensor]:
        """See `Linear.part`; a table has one part."""
        return {"weight": self.weight}
