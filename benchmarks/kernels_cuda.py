"""Attention kernels on a GPU: decode in TB/s of keys and values, prefill in TFLOP/s (4 s^2 d h / 2), each layer alone.

`python benchmarks/kernels_cuda.py [--blocking 16:64,4,5 --blocking 128:64,8,3]` tries other tile settings
(rows:keys,warps,stages). Medians of CUDA-event times; keys are random, in pages of 16 in random order; several copies
of the pool are walked in turn, so that no run finds its keys in the L2 cache.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import numpy as np
import torch

from quire.kernels import attention
from quire.kernels.attention import triton as kernels

PAGE, HQ, HK, D = 16, 32, 8, 128
L2_BYTES = 120 << 20


class Case:
    """Spans (kv_len, length) over a pool of pages, and enough copies of the pool to leave the cache."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        counts = [-(-kv_len // PAGE) for kv_len, _ in spans]
        n_pages = sum(counts) + 1
        order = np.random.default_rng(0).permutation(np.arange(1, n_pages, dtype=np.int32))
        table = np.zeros((len(spans), max(counts)), np.int32)
        for row, count, end in zip(table, counts, np.cumsum(counts), strict=True):
            row[:count] = order[end - count : end]
        self.kv_bytes = 4 * sum(kv_len for kv_len, _ in spans) * HK * D
        self.flops = sum(4 * (kv_len * n - n * (n - 1) / 2) for kv_len, n in spans) * HQ * D
        n_copies = 1 + L2_BYTES // self.kv_bytes
        self.pools = [
            torch.randn(2, n_pages, HK, PAGE, D, device="cuda", dtype=torch.bfloat16) for _ in range(n_copies)
        ]
        lengths = [length for _, length in spans]
        self.q = torch.randn(sum(lengths), HQ, D, device="cuda", dtype=torch.bfloat16)
        self.plan = attention.plan(
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            np.array([kv_len for kv_len, _ in spans], np.int32),
            np.arange(len(spans), dtype=np.int32),
            torch.from_numpy(table).cuda(),
            page_size=PAGE,
            n_q_heads=HQ,
            n_kv_heads=HK,
            head_dim=D,
        )

    def seconds(self, repeats: int = 20) -> float:
        """Median time of one layer inside a CUDA graph of one pass over all pools."""
        variant, out = attention.Variant(D**-0.5), torch.empty_like(self.q)

        def layers() -> None:
            for k_pages, v_pages in self.pools:
                attention.run(self.q, k_pages, v_pages, self.plan, variant, out=out)

        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for event in events:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return statistics.median(times) / 1e3 / len(self.pools)


def cases() -> dict[str, list[tuple[int, int]]]:
    """The table of section 3 of the recorded peers' figures: batch x context, two lognormal mixes, and prefill."""
    found = {f"decode {b} x {k}k": [(1024 * k, 1)] * b for b in (1, 16, 64) for k in (1, 4, 16)}
    found |= {f"decode 256 x {k}k": [(1024 * k, 1)] * 256 for k in (1, 4)}
    lengths = np.random.default_rng(1).lognormal(7.2, 0.8, 64).clip(64, 10000).astype(int)
    found["decode 64 lognormal"] = [(int(n), 1) for n in lengths]
    found |= {f"prefill {k}k": [(1024 * k, 1024 * k)] for k in (1, 4, 16)}
    found["mixed 2k + 63 x 2k"] = [(2048, 2048)] + [(2048, 1)] * 63
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocking", action="append", default=[], metavar="ROWS:KEYS,WARPS,STAGES")
    chosen = {}
    for text in parser.parse_args().blocking:
        rows, values = text.split(":")
        chosen[int(rows)] = tuple(int(value) for value in values.split(","))
    usual = kernels._blocking
    kernels._blocking = lambda n_rows, row_bytes: chosen.get(n_rows) or usual(n_rows, row_bytes)
    print(torch.cuda.get_device_name(), torch.__version__, {rows: usual(rows, 2 * D) for rows in (16, 128)} | chosen)
    for name, spans in cases().items():
        case = Case(spans)
        taken = case.seconds()
        rate = case.kv_bytes / taken / 1e12, case.flops / taken / 1e12
        print(f"{name:22} {taken * 1e6:9.1f} us  {rate[0]:6.2f} TB/s  {rate[1]:7.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
