"""Which GPU each replica of the benchmark sees."""

from __future__ import annotations

import pytest

from benchmarks.replicas_throughput import DEVICES, gpus_of

FOUND = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("n", "environment", "gpus"),
    [
        (4, {}, ["0", "1", "2", "3"]),
        (2, {}, ["0", "1"]),
        (2, {DEVICES: "3, 1,0"}, ["3", "1"]),
        (2, {DEVICES: "GPU-a1,GPU-b2"}, ["GPU-a1", "GPU-b2"]),
        (2, {DEVICES: ""}, []),
    ],
)
def test_every_replica_has_one(n: int, environment: dict[str, str], gpus: list[str]) -> None:
    """The first one had none where nobody named any: it made its weights on the CPU."""
    assert gpus_of(n, environment, FOUND) == gpus


def test_none_are_needed_without_gpus() -> None:
    assert gpus_of(3, {DEVICES: "0"}, []) == gpus_of(3, {}, []) == []


def test_too_few_are_refused() -> None:
    with pytest.raises(SystemExit, match="5 replicas need 5 GPUs, and there are 4: 0, 1, 2, 3"):
        gpus_of(5, {}, FOUND)
    with pytest.raises(SystemExit, match="2 replicas need 2 GPUs, and there are 1: 3"):
        gpus_of(2, {DEVICES: "3"}, FOUND)
