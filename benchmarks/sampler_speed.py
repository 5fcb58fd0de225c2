"""A decode step under several sampling parameters, against plain sampling, on random weights.

    python -m benchmarks.sampler_speed --device cuda --output sampler.json

Random weights have nearly flat logits: a nucleus of 0.9 holds most of the vocabulary, which is the worst case.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

from quire import LLM, SamplingParams
from quire.bench.report import build_report, write_report
from quire.bench.shape import shape_options

SETS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05, repetition 1.1, seed": {"min_p": 0.05, "repetition_penalty": 1.1, "seed": 7},
    "logprobs 5, presence 0.5": {"logprobs": 5, "presence_penalty": 0.5},
}
FEW: Final = 20
"""Tokens of a run whose time is taken off: it has the prompts, too."""


def took_s(llm: LLM, prompts: list[Any], n_tokens: int, values: dict[str, Any]) -> float:
    """Of all prompts at once; the results are in the host's memory then."""
    params = SamplingParams(temperature=0.6, max_tokens=n_tokens, ignore_eos=True, **values)
    begin_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin_s


def main() -> None:
    """Prints milliseconds a step, and the speed against the first set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    llm = LLM(**shape_options(options.model), device=options.device, max_num_seqs=options.batch_size)
    starts = range(5, 5 + 7 * options.batch_size, 7)
    prompts = [{"prompt_token_ids": [(at + 13 * i) % 9000 for i in range(options.input_len)]} for at in starts]
    steps_ms: dict[str, float] = {}
    for name, values in SETS.items():
        took_s(llm, prompts, FEW, values)
        few_s = min(took_s(llm, prompts, FEW, values) for _ in range(2))
        all_s = min(took_s(llm, prompts, options.output_len, values) for _ in range(2))
        steps_ms[name] = (all_s - few_s) / (options.output_len - FEW) * 1e3
        print(f"{name:36}{steps_ms[name]:8.3f} ms a step, {steps_ms['temperature'] / steps_ms[name]:.3f}", flush=True)
    llm.shutdown()
    if options.output:
        write_report(options.output, build_report("sampler_speed", vars(options), {"step_ms": steps_ms}))


if __name__ == "__main__":
    main()
