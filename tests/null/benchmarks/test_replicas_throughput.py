"""Which GPU each replica of the benchmark sees, and what it is compared with."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replicas_throughput import DEVICES, compare, gpus_of, median
from quire.core.sampling import SamplingParams

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


class Endpoint:
    """`AsyncLLM` and its fleet: one token an answer, and a note of who could have given it."""

    def __init__(self) -> None:
        self.names = ["r0", "r1", "r2"]
        self.eligible = list(self.names)
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        """Replicas that could get it, prompt."""

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
        self.asked.append((len(self.eligible), tuple(prompt)))
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * (params.max_tokens or 0))])


async def test_all_are_warm_before_one_and_all_take_turns_with_fresh_prompts() -> None:
    """One was measured cold, and all with that one warm: 3.92 times one of four, where nothing lost gives 3.91."""
    endpoint: Any = Endpoint()
    found = await compare(endpoint, endpoint, n_requests=4, n_rounds=2)
    turns = [(n, len(list(those))) for n, those in itertools.groupby(n for n, _ in endpoint.asked)]
    assert turns == [(3, 12), (1, 4), (3, 12), (1, 4), (3, 12)], "whole W2, as many as are measured"
    assert len({prompt for _, prompt in endpoint.asked}) == len(endpoint.asked) == 44
    tokens = {name: [run["output_tokens"] for run in found[name]] for name in ("one", "all")}
    assert len(tokens["one"]) == 2 and tokens["all"] == [3 * n for n in tokens["one"]]


def test_a_median_is_that_of_rounds() -> None:
    runs = [{"output_tokens_per_second": speed, "endpoint_cpu_share": speed / 10} for speed in (5.0, 1.0, 2.0)]
    assert median(runs) == 2.0 and median(runs, "endpoint_cpu_share") == 0.2
