"""What the prefix cache saves a model with recurrent layers: requests that have one long prefix, cache on and off.

    python -m benchmarks.hybrid_prefix

A small random Qwen3-Next without experts (gated DeltaNet, and gated attention in every fourth layer); a fresh prefix
each time, in turns. Prints and writes tokens a second and the share of prompt tokens that were found.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile

from quire import LLM
from quire.bench.datasets import from_lengths
from quire.bench.machine import n_cores
from quire.bench.offline import TimedRun, timed_run
from quire.bench.report import build_report, write_report

RESULTS = pathlib.Path(__file__).with_name("results")
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 4096, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 4096, "num_experts": 0, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "dtype": "float32",
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prefix cache on and off, for a model with recurrent layers.")
    parser.add_argument("--model", default="", help="a folder; default: a small random Qwen3-Next")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--outputs", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--output", default=str(RESULTS / "hybrid_prefix.json"))
    return parser.parse_args()


def engine(args: argparse.Namespace, folder: str, enable: bool) -> LLM:
    return LLM(
        folder, device=args.device, num_threads=args.threads, max_num_seqs=32, enable_prefix_caching=enable,
        skip_tokenizer_init=True, load_format="auto" if args.model else "dummy",
    )  # fmt: skip


def of(args: argparse.Namespace, runs: list[TimedRun]) -> dict[str, float]:
    elapsed_s = statistics.median(one.elapsed_s for one in runs)
    n_prompt = args.requests * (args.prefix + args.own)
    n_cached = statistics.mean(sum(one.num_cached_tokens for one in run.outputs) for run in runs)
    return {
        "elapsed_time": elapsed_s,
        "output_tokens_per_second": args.requests * args.outputs / elapsed_s,
        "prompt_tokens_per_second": n_prompt / elapsed_s,
        "hit_rate": n_cached / n_prompt,
    }


def measure(args: argparse.Namespace, folder: str) -> dict[str, object]:
    """Both engines in turns on the same fresh prompts."""
    engines = {"on": engine(args, folder, True), "off": engine(args, folder, False)}
    lengths = [(args.own, args.outputs)] * args.requests
    dataset = from_lengths(lengths, engines["on"].logits_width, seed=0, prefix_len=args.prefix)
    runs: dict[str, list[TimedRun]] = {name: [] for name in engines}
    for repetition in range(args.repeats):
        for name, llm in engines.items():
            runs[name].append(timed_run(llm, dataset(repetition), temperature=0.0))
    for llm in engines.values():
        llm.shutdown()
    result: dict[str, object] = {name: of(args, timed) for name, timed in runs.items()}
    pairs = list(zip(runs["on"], runs["off"], strict=True))
    result["speedup"] = statistics.median(off.elapsed_s / on.elapsed_s for on, off in pairs)
    return result


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        result = measure(args, args.model or folder)
    print(json.dumps(result, indent=2))
    write_report(args.output, build_report("hybrid_prefix", vars(args), result))


if __name__ == "__main__":
    main()
