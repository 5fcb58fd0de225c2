"""What `--kv-cache-dtype int8` gives on a CPU: the decode step of a model with long contexts, in turns with bfloat16.

    python -m benchmarks.kv_cache_cpu --batch 1 8 --context 8192

Dummy weights of a bundled shape, pages of random entries in random order, each sequence with pages of its own; the step
is the engine's native call without sampling. Milliseconds are medians of alternating steps; GB/s counts the weights and
the entries that the step must read.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import numpy as np
import torch

from quire.bench.machine import n_cores
from quire.bench.report import build_report, write_report
from quire.bench.shape import FOLDER
from quire.compute.device.cpu import CpuDevice
from quire.compute.forward.fused import FusedForward
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import build_batch
from quire.compute.runner.pool import KVPool
from quire.compute.runner.step import Step
from quire.compute.runner.tables import NO_WRITES, SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample import Sampler
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch
from quire.config.resolve import NOT_ROUNDED, ROUNDED_ON
from quire.core.plan import Spans, StepPlan
from quire.kernels.kvstore import entry

RESULT = pathlib.Path(__file__).with_name("results") / "kv_cache_cpu.json"
PAGE = 16
KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"], choices=[*NOT_ROUNDED, *ROUNDED_ON])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each type")
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--output", default=str(RESULT))
    return parser.parse_args()


class Decode:
    """Steps of one row for each of `n_seqs` sequences, whose last token stands at position `context` - 1."""

    def __init__(self, model: Decoder, kv_dtype: torch.dtype, n_seqs: int, context: int, device: CpuDevice) -> None:
        n_each = -(-context // PAGE)
        self.pool = KVPool(model.arch, 1 + n_seqs * n_each, PAGE, kv_dtype, device)
        entries = torch.randn(*self.pool.k.shape[1:4], model.arch.head_dim, dtype=torch.bfloat16)
        entries = entry.encode(entries) if kv_dtype == torch.int8 else entries
        for layers in (self.pool.k, self.pool.v):
            for layer in layers:
                layer.copy_(entries)
        tables = SlotTables(n_seqs, context, PAGE, device)
        order = np.random.default_rng(0).permutation(n_seqs * n_each).reshape(n_seqs, n_each)
        tables.pages[0, :n_seqs, :n_each] = torch.from_numpy(1 + order)
        tail = Tail(device, model, tables, Sampler(n_seqs, model.arch.vocab_size, device.torch_device))
        self.forward = FusedForward(device, model, self.pool, tables, tail, max_rows=n_seqs, max_num_seqs=n_seqs)
        spans = Spans()
        for slot in range(n_seqs):
            spans.add(slot, context - 1, 1, True)
        self.step = Step(StepPlan(0, spans), build_batch(spans), NO_WRITES, [], wants_all=False)
        self.n_bytes = model.n_bytes + n_seqs * context * self.pool.bytes_per_token

    def seconds(self) -> float:
        """One step."""
        start_s = time.perf_counter()
        self.forward.run(self.step)
        return time.perf_counter() - start_s


def measure(model: Decoder, n_seqs: int, args: argparse.Namespace, device: CpuDevice) -> dict[str, object]:
    """Both types in turns."""
    both = {name: Decode(model, dtype, n_seqs, args.context, device) for name, dtype in KV_DTYPES.items()}
    times: dict[str, list[float]] = {name: [] for name in both}
    for step in range(args.steps + 1):
        for name, decode in both.items():
            took_s = decode.seconds()
            if step:
                times[name].append(took_s)
    found: dict[str, object] = {
        name: {
            "ms": statistics.median(values) * 1e3,
            "gb_per_s": both[name].n_bytes / statistics.median(values) / 1e9,
            "kv_bytes": n_seqs * args.context * both[name].pool.bytes_per_token,
        }
        for name, values in times.items()
    }
    found["speedup"] = statistics.median(a / b for a, b in zip(times["bfloat16"], times["int8"], strict=True))
    return found


@torch.inference_mode()
def main() -> None:
    args = parse_arguments()
    device, folder = CpuDevice(args.threads), FOLDER / args.shape
    results: dict[str, object] = {}
    for quantization in args.quantization:
        model = load_model(
            folder, read_arch(folder), dtype=torch.bfloat16, device=device.torch_device, max_model_len=args.context,
            load_format="dummy", quantization=quantization, progress=False,
        )  # fmt: skip
        for n_seqs in args.batch:
            name = f"weights {quantization}, batch {n_seqs}"
            results[name] = measure(model, n_seqs, args, device)
            print(name, results[name], flush=True)
    write_report(
        args.output,
        build_report("kv_cache_cpu", {name: value for name, value in vars(args).items() if name != "output"}, results),
    )


if __name__ == "__main__":
    main()
