"""Continuous batching against static batches: Quire and transformers `generate` on the same requests, in turns.

    python -m benchmarks.static_batching                        # the demo model
    python -m benchmarks.static_batching --model shape:qwen3-0.6b --repeats 1

Both get the same prompts, output lengths, threads, dtype and maximum batch. A static batch runs until its longest
request is done; only tokens that a request asked for count, for both sides.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from quire import LLM
from quire.bench.datasets import BenchRequest, from_lengths
from quire.bench.machine import n_cores
from quire.bench.offline import timed_run
from quire.bench.report import build_report, write_report
from quire.bench.shape import PREFIX, shape_options
from quire.compute.weights.hub import find_checkpoint

RESULTS = pathlib.Path(__file__).with_name("results")
MIN_OUTPUT, MAX_OUTPUT = 8, 256


@dataclasses.dataclass(slots=True)
class Timed:
    """Tokens of each request and the seconds of the whole run."""

    token_ids: list[list[int]]
    elapsed_s: float


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quire against static batches of transformers, on the CPU.")
    parser.add_argument("--model", default="demo", help="demo, a folder, or shape:<name> for random weights")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="most sequences at once, for both")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the output lengths, to shorten the run")
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--output", default="", help="report (default benchmarks/results/static_batching_<model>.json)")
    return parser.parse_args()


def make_requests(n: int, scale: float, vocab_size: int, repetition: int) -> list[BenchRequest]:
    """Prompts of 16 to 64 random tokens; outputs uniform in 8 to 256 times `scale`, the same in every repetition."""
    rng = random.Random(0)
    lengths = [(rng.randint(16, 64), max(1, round(scale * rng.randint(MIN_OUTPUT, MAX_OUTPUT)))) for _ in range(n)]
    return from_lengths(lengths, vocab_size, seed=0)(repetition)


def run_quire(llm: LLM, requests: list[BenchRequest]) -> Timed:
    """All requests at once; the engine fills its slots as they free up."""
    run = timed_run(llm, requests, temperature=0.0)
    return Timed(run.token_ids, run.elapsed_s)


def run_transformers(model: transformers.PreTrainedModel, requests: list[BenchRequest], batch: int) -> Timed:
    """Batches in order of arrival, left-padded; each runs to its longest output."""
    begin_s = time.perf_counter()
    token_ids = []
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        width = max(len(one.prompt_token_ids) for one in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(group):
            ids[row, width - len(one.prompt_token_ids) :] = torch.tensor(one.prompt_token_ids)
            mask[row, width - len(one.prompt_token_ids) :] = 1
        longest = max(one.output_len for one in group)
        generated = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=longest,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert generated.shape[1] == width + longest
        token_ids += [row[width : width + one.output_len].tolist() for row, one in zip(generated, group, strict=True)]
    return Timed(token_ids, time.perf_counter() - begin_s)


def load(model: str, dtype: str, batch: int, threads: int) -> tuple[LLM, transformers.PreTrainedModel]:
    """The same model twice; for a shape both have random weights of their own, which does not change the work."""
    options = shape_options(model) if model.startswith(PREFIX) else {"model": model}
    llm = LLM(**options, device="cpu", dtype=dtype, max_model_len=512, max_num_seqs=batch, num_threads=threads)
    folder = find_checkpoint(str(options["model"]))
    if model.startswith(PREFIX):
        config = transformers.AutoConfig.from_pretrained(folder)
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    else:
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    reference.generation_config = transformers.GenerationConfig()  # no sampling defaults from the checkpoint
    return llm, reference.eval()


def figures(runs: list[Timed]) -> dict[str, object]:
    n_tokens = sum(len(ids) for ids in runs[0].token_ids)
    elapsed_s = statistics.median(run.elapsed_s for run in runs)
    return {"output_tokens_per_second": n_tokens / elapsed_s, "elapsed_times": [run.elapsed_s for run in runs]}


def main() -> None:
    args = parse_arguments()
    llm, reference = load(args.model, args.dtype, args.batch, args.threads)
    torch.set_num_threads(args.threads)
    sides: dict[str, Callable[[list[BenchRequest]], Timed]] = {
        "quire": lambda requests: run_quire(llm, requests),
        "transformers": lambda requests: run_transformers(reference, requests, args.batch),
    }
    for side in sides.values():
        side(make_requests(args.batch, 8 / MAX_OUTPUT, llm.logits_width, -1))
    runs: dict[str, list[Timed]] = {name: [] for name in sides}
    for repetition in range(args.repeats):
        requests = make_requests(args.requests, args.scale, llm.logits_width, repetition)
        for name, side in sides.items():
            timed = side(requests)
            runs[name].append(timed)
            print(f"{name:<14}{sum(map(len, timed.token_ids)) / timed.elapsed_s:10.1f} tokens/s", flush=True)
    llm.shutdown()
    results: dict[str, object] = {name: figures(timed) for name, timed in runs.items()}
    results["ratio"] = statistics.median(
        theirs.elapsed_s / ours.elapsed_s for ours, theirs in zip(runs["quire"], runs["transformers"], strict=True)
    )
    results["n_output_tokens"] = sum(one.output_len for one in requests)
    if not args.model.startswith(PREFIX):
        pairs = zip(runs["quire"][-1].token_ids, runs["transformers"][-1].token_ids, strict=True)
        results["n_identical_outputs"] = sum(ours == theirs for ours, theirs in pairs)
    print(f"ratio {results['ratio']:.2f}")
    path = args.output or str(RESULTS / f"static_batching_{args.model.removeprefix(PREFIX)}.json")
    write_report(path, build_report("static_batching", vars(args), results))


if __name__ == "__main__":
    main()
