"""A step in halves whose sums go on a second stream is the step: late sums of one rank, and those of several GPUs."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import halved_rank
import pytest
import torch
from halved_rank import check, write_model

from quire.compute.device.cuda import CudaDevice
from quire.compute.dist.comm import Reduction, SoloComm
from quire.kernels.norm import rms_norm

pytestmark = pytest.mark.gpu


class SlowComm(SoloComm):
    """Rank 0 of two, of which the other one has the same: its sums take a millisecond."""

    size = 2

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        return x.mul_(2)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])

    def add_reduced(
        self, z: torch.Tensor, x: torch.Tensor, norm: Any = None, *, beside: bool = False
    ) -> torch.Tensor | None:
        torch.cuda._sleep(2_000_000)
        x.add_(z, alpha=2)
        return None if norm is None else rms_norm(x, *norm)


def test_late_sums(tmp_path: pathlib.Path) -> None:
    check(CudaDevice(), SlowComm(), write_model(tmp_path))


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_halves_of_ranks(n_ranks: int, tmp_path: pathlib.Path) -> None:
    """Also that ranks have the same bits."""
    if torch.cuda.device_count() < n_ranks:
        pytest.skip(f"needs {n_ranks} GPUs")
    command = [sys.executable, halved_rank.__file__]
    given = [str(n_ranks), str(tmp_path / "meet"), str(write_model(tmp_path))]
    ranks = [subprocess.Popen([*command, str(rank), *given]) for rank in range(n_ranks)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * n_ranks
    finally:
        for rank in ranks:
            rank.kill()
