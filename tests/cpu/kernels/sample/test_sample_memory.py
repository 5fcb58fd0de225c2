"""What the memory equation counts for the sampler of a GPU is what its launcher asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.kernels.sample import triton
from quire.kernels.sample.draw import Choice
from quire.planner.sampling import row_bytes


class NoKernel:
    """Takes the place of one: only the launcher runs."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 40, 1024, 1025, 5000, 32_000, 128_256, 151_936])
def test_the_scratch_of_a_row(monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype) -> None:
    for name in ("_group_stats", "_select", "collect", "_finish"):
        monkeypatch.setattr(triton, name, NoKernel())
    n_rows, made, empty = 3, [], torch.empty

    def noted(*sizes: Any, **options: Any) -> torch.Tensor:
        made.append(empty(*sizes, **options))
        return made[-1]

    logits, controls = empty(n_rows, width, dtype=dtype), torch.zeros(5, n_rows, dtype=torch.float64)
    out = Choice(empty(n_rows, dtype=torch.int32), empty(n_rows, dtype=torch.uint8))
    monkeypatch.setattr(torch, "empty", noted)
    triton.choose_by(logits, controls, out)
    assert sum(one.nbytes for one in made) == n_rows * row_bytes(width, dtype.itemsize)
