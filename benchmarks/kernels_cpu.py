"""Native CPU kernels against torch: paged attention against dense scaled_dot_product_attention, row ops against the
references. Each pair is timed in turns in one run; medians. `python benchmarks/kernels_cpu.py [--threads 2]`.

Torch's attention gets dense, contiguous, head-repeated keys for free; ours reads pages in random order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from quire.kernels import act, attention, kvstore, native, norm, rope
from quire.kernels.act import reference as act_reference
from quire.kernels.kvstore import reference as kvstore_reference
from quire.kernels.norm import reference as norm_reference
from quire.kernels.rope import reference as rope_reference

PAGE = 16


def medians_s(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of both, run in turns after one warm-up each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for times, call in zip(taken, (ours, theirs), strict=True):
            start = time.perf_counter()
            call()
            if turn:
                times.append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])


class Case:
    """`batch` sequences with `context` keys each, of which the last `length` are queries."""

    def __init__(self, batch: int, context: int, length: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.hq, self.hk, self.d = shape
        self.batch, self.context, self.length, self.dtype = batch, context, length, dtype
        per_seq = -(-context // PAGE)
        n_pages = batch * per_seq + 1
        self.k_pages = torch.randn(n_pages, self.hk, PAGE, self.d).to(dtype)
        self.v_pages = torch.randn(n_pages, self.hk, PAGE, self.d).to(dtype)
        order = np.random.default_rng(0).permutation(np.arange(1, n_pages, dtype=np.int32))
        self.table = torch.from_numpy(order.reshape(batch, per_seq))
        self.q = torch.randn(batch * length, self.hq, self.d).to(dtype)
        self.variant = attention.Variant(self.d**-0.5)

    def plan(self) -> attention.AttnPlan:
        return attention.plan(
            np.arange(self.batch + 1, dtype=np.int32) * self.length,
            np.full(self.batch, self.context, np.int32),
            np.arange(self.batch, dtype=np.int32),
            self.table,
            page_size=PAGE,
            n_q_heads=self.hq,
            n_kv_heads=self.hk,
            head_dim=self.d,
        )

    def dense(self) -> Callable[[], torch.Tensor]:
        group = self.hq // self.hk
        pages = self.table.long()
        keys, values = (
            p[pages].transpose(1, 2).flatten(2, 3)[:, :, : self.context].repeat_interleave(group, 1).contiguous()
            for p in (self.k_pages, self.v_pages)
        )
        q = self.q.view(self.batch, self.length, self.hq, self.d).transpose(1, 2).contiguous()
        causal = self.length > 1
        return lambda: F.scaled_dot_product_attention(q, keys, values, is_causal=causal)

    def measure(self, repeats: int) -> dict[str, object]:
        plan, dense = self.plan(), self.dense()
        ours, theirs = medians_s(
            lambda: attention.run(self.q, self.k_pages, self.v_pages, plan, self.variant), dense, repeats
        )
        pairs = self.batch * (self.context * self.length - self.length * (self.length - 1) / 2)
        flops = 4 * pairs * self.hq * self.d
        kv_bytes = 2 * self.batch * self.context * self.hk * self.d * self.q.element_size()
        name = f"{str(self.dtype)[6:]} {self.batch} x {self.length} of {self.context}, {self.hq}/{self.hk} x {self.d}"
        rate = (flops / 1e9, "GFLOP/s") if self.length > 1 else (kv_bytes / 1e9, "GB/s of KV")
        return {"case": name, "unit": rate[1], "ours": round(rate[0] / ours, 1), "torch": round(rate[0] / theirs, 1)}


def row_ops(n: int, h: int, dtype: torch.dtype, repeats: int) -> list[dict[str, object]]:
    """Microseconds of each row op, ours and the torch reference."""
    x, y, weight = torch.randn(n, h).to(dtype), torch.randn(n, h).to(dtype), torch.ones(h, dtype=dtype)
    gate_up = torch.randn(n, 6 * h).to(dtype)
    q, k = torch.randn(n, h // 64, 64).to(dtype), torch.randn(n, h // 128, 64).to(dtype)
    positions, cos_sin = torch.arange(n), torch.randn(max(n, 16), 64)
    pages = torch.zeros(n // PAGE + 2, h // 128, PAGE, 64, dtype=dtype)
    cells = torch.arange(n) + PAGE
    calls = {
        "rms_norm": (lambda: norm.rms_norm(x, weight, 1e-5), lambda: norm_reference.rms_norm(x, weight, 1e-5)),
        "add_rms_norm": (
            lambda: norm.add_rms_norm(x, y, weight, 1e-5),
            lambda: norm_reference.add_rms_norm(x, y, weight, 1e-5),
        ),
        "silu_mul": (lambda: act.silu_mul(gate_up), lambda: act_reference.silu_mul(gate_up)),
        "apply_rope": (
            lambda: rope.apply_rope(q, k, positions, cos_sin),
            lambda: rope_reference.apply_rope(q, k, positions, cos_sin),
        ),
        "store_kv": (
            lambda: kvstore.store_kv(k, k, pages, pages, cells),
            lambda: kvstore_reference.store_kv(k, k, pages, pages, cells),
        ),
    }
    rows = []
    for name, (ours, theirs) in calls.items():
        fast, slow = medians_s(ours, theirs, repeats)
        case = f"{name} {str(dtype)[6:]} [{n}, {h}]"
        rows.append({"case": case, "unit": "us", "ours": round(fast * 1e6, 1), "torch": round(slow * 1e6, 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", default="", help="write the rows to this file as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(native.explain(), f"torch {torch.__version__}, {options.threads} threads")
    rows: list[dict[str, object]] = []
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for d, heads in ((64, (32, 8)), (128, (16, 8))):
            for batch, context, length in ((1, 512, 512), (1, 2048, 2048), (1, 4096, 1), (8, 2048, 1), (32, 512, 1)):
                rows.append(Case(batch, context, length, (*heads, d), dtype).measure(options.repeats))
                print(rows[-1])
    for n in (1, 8, 512):
        for row in row_ops(n, 1024, torch.bfloat16, 8 * options.repeats):
            rows.append(row)
            print(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
