"""Probes of this CPU by one thread: torch's number of threads is as before, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from quire.bench.kernels import limits, steadiness
from quire.bench.kernels.timing import Call, CpuTimer, Sample


class Interrupted(CpuTimer):
    """Of which no measurement ends."""

    def sample(self, calls: Sequence[Call], budget_s: float, capture: bool = True) -> Sample:
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_probe_of_steadiness() -> None:
    steadiness.of_probe()
    assert torch.get_num_threads() == 2


def test_an_interrupted_trial_of_products() -> None:
    with pytest.raises(KeyboardInterrupt):
        limits.matmul_rate(Interrupted(), torch.float32, 0.1)
    assert torch.get_num_threads() == 2
