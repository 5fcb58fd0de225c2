"""Quire's `LLM` in this process, as a child of `lines.Worker`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.lines import serve
from quire import LLM, SamplingParams
from quire.bench.datasets import BenchRequest
from quire.bench.offline import decode_step_times_s, timed_run
from quire.kernels import native

KV_TOKENS = 7168
"""What the KV cache holds: the largest workload. All of it is used once before anything is measured: memory that no
program has touched is slow, and llama.cpp clears its cache when it is made."""


def fill(llm: LLM) -> None:
    """Prompts that take every page once."""
    length, params = 1000, SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = [[300 + i] * length for i in range(-(-KV_TOKENS // length))]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def run(llm: LLM, prompts: list[list[int]], output_lens: list[int], slots: int, unified: bool) -> dict[str, float]:
    """All requests at once; figures as in `lines.continuous`, `slots` and `unified` being the peers' business."""
    requests = [BenchRequest(prompt, n) for prompt, n in zip(prompts, output_lens, strict=True)]
    timed = timed_run(llm, requests, temperature=0.0)
    times_s = decode_step_times_s(timed.timeline, len(requests))
    metrics = [output.metrics for output in timed.outputs]
    return {
        "first_s": max(one.first_token_s or 0.0 for one in metrics) - min(one.arrival_s for one in metrics),
        "decode_s": sum(times_s), "n_decoded": len(requests) * len(times_s),
        "total_s": timed.elapsed_s, "n_out": sum(output_lens),
    }  # fmt: skip


def prepare(threads: int, **options: Any) -> tuple[Any, Callable[..., Any]]:
    """Load a model; answers `run`."""
    llm = LLM(**options, device="cpu", num_threads=threads, num_gpu_blocks_override=KV_TOKENS // 16)
    fill(llm)
    return {"kernels": native.explain()}, lambda op, **request: run(llm, **request)


if __name__ == "__main__":
    serve(prepare)
