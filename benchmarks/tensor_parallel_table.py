"""FasterTransformer's table of GPT-20B: latency and throughput by ranks, lengths and batch.

    python -m benchmarks.tensor_parallel_table                            # a small GPT, one and two processes, gloo
    python -m benchmarks.tensor_parallel_table --device cuda --ranks 1,2,4
    python -m benchmarks.tensor_parallel_table --planned a100-80 --ranks 1,2,4     # the planner alone, on their GPUs

On GPUs the model is theirs: GPT-2's architecture with 44 layers, hidden 6,144, 48 heads of 128, feed-forward 24,576 and
51,200 ids, random weights in bfloat16; a batch comes at once, top-p 0.9. Beside it the planner's expectation, where the
GPU is in its table, and what FasterTransformer published of A100s (`faster_transformer_gpt20b.json`).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Final

from benchmarks.rank_engines import (
    Row,
    engine,
    expected,
    model_folder,
    numbers,
    options_of,
    prompts_of,
    recording,
    say,
    took_s,
)
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.engine.step_record import StepRecord
from quire.planner.accelerators import accelerator_named
from quire.planner.cost import calibrated
from quire.planner.serving import closed_batch_s

GPT_20B: Final = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 51200, "n_embd": 6144, "n_layer": 44,
    "n_head": 48, "n_positions": 1024,
}  # fmt: skip
GPT_SMALL: Final = {**GPT_20B, "vocab_size": 2048, "n_embd": 256, "n_layer": 4, "n_head": 4}
PUBLISHED: Final = pathlib.Path(__file__).with_name("faster_transformer_gpt20b.json")
MODELS: Final = {"cpu": GPT_SMALL, "cuda": GPT_20B}
BATCHES: Final = {"cpu": "1,2,4,8,16", "cuda": "1,2,4,8,16,32,64,128,256"}
STEP_TOKENS, PAGE_SIZE = 8192, 16
COLUMNS: Final = {
    "input": "in", "output": "out", "batch": "batch", "ranks": "ranks", "ms": "ms", "tokens_per_s": "tokens/s",
    "speedup": "of one rank", "at_once": "at once", "expected_ms": "planner ms", "published_ms": "A100s ms",
}  # fmt: skip
"""`at_once`: sequences that ran together at most: fewer than the batch where keys and values do not fit."""
ERROR: Final = {"error": "error"}


def lengths_of(text: str) -> list[tuple[int, int]]:
    """'20x8,60x20' → (input, output) of each."""
    pairs = [one.split("x") for one in text.split(",")]
    return [(int(n_in), int(n_out)) for n_in, n_out in pairs]


def published() -> dict[tuple[int, int, int, int], float | None]:
    """(input, output, batch, ranks) → ms."""
    rows = json.loads(PUBLISHED.read_text())["rows"]
    return {
        (n_in, n_out, batch, ranks): ms
        for batch, n_in, n_out, *found in rows
        for ranks, ms in zip((1, 2, 4), found, strict=True)
    }


def rank_rows(folder: str, n_ranks: int, options: argparse.Namespace) -> list[Row]:
    """All lengths and batches of one engine."""
    lengths, batches = lengths_of(options.lengths), numbers(options.batches or BATCHES[options.device])
    llm = engine(
        folder, options.device, tensor_parallel_size=n_ranks, max_num_seqs=max(batches),
        max_num_batched_tokens=STEP_TOKENS, max_model_len=max(sum(one) for one in lengths), block_size=PAGE_SIZE,
    )  # fmt: skip
    cost, known = expected(folder, options.device, Mesh(tp=n_ranks)), published() if options.device == "cuda" else {}
    pool_tokens = llm.stats().n_pages * PAGE_SIZE
    vocab_size, rows = int(MODELS[options.device]["vocab_size"]) - 1, list[Row]()
    took_s(llm, prompts_of(max(batches), min(n_in for n_in, _ in lengths), vocab_size), 4)
    for n_in, n_out in lengths:
        for batch in batches:
            records: list[StepRecord] = []
            prompts = prompts_of(batch, n_in, vocab_size)
            llm.on_step = records.append
            seconds = statistics.median(
                took_s(llm, prompts, n_out, temperature=1.0, top_p=0.9, seed=1) for _ in range(options.rounds)
            )
            llm.on_step = None
            n_most = max(one.n_spans for one in records)
            told = None
            if cost is not None:
                told = closed_batch_s(cost, [(n_in, n_out)] * batch, max(batches), STEP_TOKENS, pool_tokens)
            rows.append({
                "input": n_in, "output": n_out, "batch": batch, "ranks": n_ranks, "ms": 1e3 * seconds,
                "tokens_per_s": batch * n_out / seconds, "at_once": n_most,
                "expected_ms": None if told is None else 1e3 * told,
                "published_ms": known.get((n_in, n_out, batch, n_ranks)),
            })  # fmt: skip
    llm.shutdown()
    return rows


def planned_rows(folder: str, n_ranks: int, options: argparse.Namespace) -> list[Row]:
    """Without devices: what the planner expects of GPT-20B beside what was published."""
    arch = read_arch(pathlib.Path(folder))
    cost, known = calibrated(arch, accelerator_named(options.planned), mesh=Mesh(tp=n_ranks)), published()
    batches, rows = numbers(options.batches or BATCHES["cuda"]), list[Row]()
    for n_in, n_out in lengths_of(options.lengths):
        for batch in batches:
            said_ms = 1e3 * closed_batch_s(cost, [(n_in, n_out)] * batch, max(batches), STEP_TOKENS, 1 << 40)
            known_ms = known.get((n_in, n_out, batch, n_ranks))
            rows.append({
                "input": n_in, "output": n_out, "batch": batch, "ranks": n_ranks, "ms": None, "expected_ms": said_ms,
                "published_ms": known_ms, "error": said_ms / known_ms - 1 if known_ms else None,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--lengths", default="20x8,60x20,128x20,80x200,200x200", help="input x output")
    parser.add_argument("--batches", default="", help=f"default: {BATCHES['cuda']} on GPUs, {BATCHES['cpu']} on a CPU")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    parser.add_argument("--planned", default="", help="a GPU of the planner's table, in place of a measurement")
    options = parser.parse_args()
    model = MODELS["cuda" if options.planned else options.device]
    columns = COLUMNS | ERROR if options.planned else COLUMNS
    make = planned_rows if options.planned else rank_rows
    name = "tensor_parallel_table"
    with model_folder(model) as folder, recording(name, options, model=dict(model)) as rows:
        for n_ranks in numbers(options.ranks):
            found = make(folder, n_ranks, options)
            alone = {(one["input"], one["output"], one["batch"]): one["ms"] for one in rows if one["ranks"] == 1}
            for one in found:
                alone_ms = alone.get((one["input"], one["output"], one["batch"]))
                one["speedup"] = alone_ms / one["ms"] if alone_ms and one["ms"] else None
            say(found, columns)
            rows += found


if __name__ == "__main__":
    main()
