"""The named workloads W1 to W6: fixed definitions, so that figures of different days and engines can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from quire.bench.datasets import TOKEN_LIMIT, Dataset, from_lengths, nano_vllm, read_lengths
from quire.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class LatencyCase:
    """One latency measurement: a batch of equal requests, greedy."""

    batch_size: int
    input_len: int
    output_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What a named workload fixes; `cases` for latency, otherwise `throughput_dataset` has its requests."""

    meaning: str
    model: str
    max_model_len: int
    temperature: float = 0.0
    cases: tuple[LatencyCase, ...] = ()


def check_lengths(cases: Iterable[LatencyCase], max_model_len: int) -> None:
    """ConfigError for a case that the context cannot hold."""
    for case in cases:
        if case.input_len + case.output_len > max_model_len:
            raise ConfigError(
                f"--input-len {case.input_len} + --output-len {case.output_len} is more than the {max_model_len} "
                "tokens that this model's context holds (max_model_len): lower one of them"
            )


WORKLOADS = {
    "W1": Workload(
        "nano-vllm's benchmark: 256 requests, prompts and outputs of 100-1024 tokens, all at once",
        "shape:qwen3-0.6b", 4096, temperature=0.6,
    ),
    "W2": Workload("the lengths of W1 on the 8B shape", "shape:llama-3.1-8b", 4096, temperature=0.6),
    "W3": Workload(
        "1,000 requests with ShareGPT-like lengths from --dataset-path, all at once",
        "shape:llama-3.1-8b", 4096, temperature=0.6,
    ),
    "W4": Workload(
        "one stream: 128 in, 256 out; time to the first token for 1,024 and 8,192 in",
        "shape:llama-3.1-8b", 8704,
        cases=(LatencyCase(1, 128, 256), LatencyCase(1, 1024, 1), LatencyCase(1, 8192, 1)),
    ),
    "W5": Workload(
        "512 requests: one fresh prefix of 2,048 tokens and 64 own tokens each, 64 out",
        "shape:llama-3.1-8b", 4096,
    ),
    "W6": Workload(
        "batches of 1, 8, 32, 128 and 256: 1,024 in, 128 out; ms a decode step",
        "shape:llama-3.1-8b", 4096,
        cases=tuple(LatencyCase(batch_size, 1024, 128) for batch_size in (1, 8, 32, 128, 256)),
    ),
}  # fmt: skip

THROUGHPUT_WORKLOADS = tuple(name for name, workload in WORKLOADS.items() if not workload.cases)
LATENCY_WORKLOADS = tuple(name for name, workload in WORKLOADS.items() if workload.cases)


def throughput_dataset(name: str, dataset_path: str) -> Dataset:
    """The requests of a throughput workload. ConfigError if W3 is asked for without its lengths file."""
    if name in ("W1", "W2"):
        return nano_vllm
    if name == "W5":
        return from_lengths([(64, 64)] * 512, TOKEN_LIMIT, seed=0, prefix_len=2048)
    if not dataset_path:
        raise ConfigError("workload W3 takes its lengths from a JSON file of 'input' and 'output': give --dataset-path")
    return from_lengths(read_lengths(dataset_path, 1000), TOKEN_LIMIT, seed=0)
