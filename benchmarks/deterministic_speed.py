"""What a decode step costs when none, one, half or all of its requests ask for `deterministic`, on random weights.

    python -m benchmarks.deterministic_speed --model shape:llama-3.1-8b --device cuda --output deterministic.json

The engine is one that serves both kinds. `bench throughput --deterministic` is for engines in which all ask.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.report import build_report, write_report
from quire.bench.shape import shape_options

FEW = 20
"""Tokens of a run whose time is taken off: it has the prompts, too."""


def took_s(llm: LLM, prompts: list[Any], n_tokens: int, n_asking: int) -> float:
    """Of all prompts at once."""
    params = [
        SamplingParams(temperature=0.6, seed=i, max_tokens=n_tokens, ignore_eos=True, deterministic=i < n_asking)
        for i in range(len(prompts))
    ]
    begin_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin_s


def main() -> None:
    """Prints milliseconds a step, and the speed against none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=120)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    llm = LLM(**shape_options(options.model), device=options.device, max_num_seqs=max(options.batch_sizes))
    rows = []
    for size in options.batch_sizes:
        starts = range(5, 5 + 7 * size, 7)
        prompts = [{"prompt_token_ids": [(at + 13 * i) % 9000 for i in range(options.input_len)]} for at in starts]
        plain_ms = 0.0
        for n_asking in sorted({0, 1, size // 2, size}):
            took_s(llm, prompts, FEW, n_asking)
            few_s = min(took_s(llm, prompts, FEW, n_asking) for _ in range(2))
            all_s = min(took_s(llm, prompts, options.output_len, n_asking) for _ in range(2))
            step_ms = (all_s - few_s) / (options.output_len - FEW) * 1e3
            plain_ms = plain_ms or step_ms
            rows.append({"batch_size": size, "asking": n_asking, "step_ms": step_ms, "speed": plain_ms / step_ms})
            print(f"{size:>4} sequences, {n_asking:>4} ask{step_ms:10.3f} ms{plain_ms / step_ms:8.3f}", flush=True)
    llm.shutdown()
    if options.output:
        write_report(options.output, build_report("deterministic_speed", vars(options), {"rows": rows}))


if __name__ == "__main__":
    main()
