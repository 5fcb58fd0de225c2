"""What sequences hold of keys and values, and the time of a token, with groups of layers and with one page table.

    python -m benchmarks.kv_groups --model shape:gemma-3-1b --input-len 32000 --batch-size 1 --output-len 64

Random weights of the shape; both ways in turns in one process, with the same prompts. Bytes are those of the pages that
the sequences hold at their end, divided by their tokens; milliseconds are the median of the steps that decode all of
them. Writes a report with commit, hardware and command.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

from quire.bench.datasets import from_lengths
from quire.bench.offline import submit
from quire.bench.report import build_report, write_report
from quire.bench.shape import shape_options
from quire.config.kv import kv_layout
from quire.config.model import read_arch
from quire.engine.llm import LLM
from quire.engine.step_record import StepRecord

KV_ITEMSIZE = 2
"""Bytes: bfloat16."""
RESULT = pathlib.Path(__file__).with_name("results") / "kv_groups.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:gemma-3-1b")
    parser.add_argument("--input-len", type=int, default=32_000)
    parser.add_argument("--output-len", type=int, default=64, help="more than steps for all prompts")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", default=str(RESULT))
    return parser.parse_args()


def measure(args: argparse.Namespace, has_groups: bool) -> dict[str, float]:
    """One engine, one batch after a short one."""
    length, options = args.input_len + args.output_len, shape_options(args.model)
    layout = kv_layout(read_arch(pathlib.Path(str(options["model"]))), length + 1, hybrid=has_groups)
    llm = LLM(
        **options, device=args.device, max_model_len=length + 1, max_num_seqs=args.batch_size,
        enable_prefix_caching=False, num_gpu_blocks_override=args.num_gpu_blocks_override,
        disable_hybrid_kv_cache_manager=not has_groups,
    )  # fmt: skip
    n_slots, last_s, decode_s = 0, 0.0, []

    def note(record: StepRecord) -> None:
        """Steps overlap: one takes from the end of the one before to its own."""
        nonlocal n_slots, last_s
        decodes = record.n_tokens == record.n_spans == record.n_running == args.batch_size
        if decodes:
            n_slots = llm.stats().n_slots_taken
            decode_s.extend([record.time_s - last_s] if last_s else [])
        last_s = record.time_s if decodes else 0.0

    try:
        submit(llm, from_lengths([(64, 4)] * args.batch_size, 10_000, "warm")(0), 0.0)
        llm.on_step = note
        begin_s = time.perf_counter()
        submit(llm, from_lengths([(args.input_len, args.output_len)] * args.batch_size, 10_000, "kv")(0), 0.0)
        seconds = time.perf_counter() - begin_s
    finally:
        llm.shutdown()
    return {
        "bytes a token": n_slots * layout.numbers * KV_ITEMSIZE / (args.batch_size * length),
        "ms a token": 1e3 * statistics.median(decode_s),
        "seconds": seconds,
    }


def main() -> None:
    args = arguments()
    rows = [
        {"groups": has_groups} | measure(args, has_groups)
        for number in range(args.rounds)
        for has_groups in ((True, False) if number % 2 == 0 else (False, True))
    ]
    for row in rows:
        print(row)
    write_report(args.output, build_report("kv_groups", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
