"""Sums over GPUs through memory that they share: bits, replays, late ranks, and a rank that does not come."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
RANK = pathlib.Path(__file__).with_name("peer_rank.py")


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_sums_through_shared_memory(n_ranks: int, tmp_path: pathlib.Path) -> None:
    if torch.cuda.device_count() < n_ranks:
        pytest.skip(f"needs {n_ranks} GPUs")
    command = [sys.executable, "-c", RANK.read_text()]
    ranks = [subprocess.Popen([*command, str(rank), str(n_ranks), str(tmp_path / "meet")]) for rank in range(n_ranks)]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * n_ranks
    finally:
        for rank in ranks:
            rank.kill()
