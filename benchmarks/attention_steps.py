"""Times attention of whole decode steps on a Hopper GPU: shared prefixes, many short sequences, few, mixed lengths.

    python benchmarks/attention_steps.py [--only shared,512x400]

Through the public API, with buffers as the engine makes them, in a CUDA graph; every layer reads pages of its own, more
than the second-level cache holds. Llama-3.1-8B's heads. Columns: microseconds of a layer; of its kernels alone, where
there are several; TB/s of the keys and values that have to be read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Iterator

import numpy as np
import torch

from quire.kernels import attention
from quire.kernels.attention.hopper import launcher as hopper
from quire.kernels.attention.op import plan_buffers
from quire.kernels.attention.schedule.plan import AttnPlan, SharedPrefix
from quire.kernels.attention.schedule.tiles import small_rows_of
from quire.kernels.attention.variant import Variant

PAGE_SIZE, N_Q_HEADS, N_KV_HEADS, HEAD_DIM = 16, 32, 8, 128
KEY_BYTES = 2 * N_KV_HEADS * HEAD_DIM * 2
L2_BYTES = 200 << 20
"""Read by all layers together: several times what an H200 keeps."""
MAX_NUM_SEQS = 512
KERNELS = ("small", "large", "merge")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One row for each sequence."""

    kv_lens: np.ndarray
    n_shared: int = 0


def steps() -> dict[str, Step]:
    """The cases by name."""
    rng = np.random.default_rng(1)
    found = {
        "shared": Step(2048 + rng.integers(40, 121, 512), 2048),
        "512x400": Step(np.full(512, 400)),
        "256x1k": Step(np.full(256, 1024)),
        "64x1k": Step(np.full(64, 1024)),
        "1x300": Step(np.full(1, 300)),
        "8x1k": Step(np.full(8, 1024)),
        "lognormal": Step(rng.lognormal(6.9, 0.8, 256).clip(64, 10000).astype(np.int64)),
        "64x16k": Step(np.full(64, 16384)),
        "1x16k": Step(np.full(1, 16384)),
    }
    return {name: dataclasses.replace(step, kv_lens=step.kv_lens.astype(np.int32)) for name, step in found.items()}


@dataclasses.dataclass(slots=True)
class Layers:
    """A step's plan, and q, keys and values of several layers."""

    plan: AttnPlan
    q: torch.Tensor
    pages: list[torch.Tensor]
    out: torch.Tensor
    n_bytes: int

    def run(self) -> None:
        """All layers."""
        variant = Variant(HEAD_DIM**-0.5)
        for k, v in self.pages:
            attention.run(self.q, k, v, self.plan, variant, out=self.out)

    def seconds(self, repeats: int = 9) -> float:
        """Of a layer, in a graph."""
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for event in events:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3 / len(self.pages)


def prepare(step: Step) -> Layers:
    """Pages in random order, those of a shared prefix once."""
    torch.manual_seed(0)
    n_spans, n_shared = len(step.kv_lens), step.n_shared // PAGE_SIZE
    counts = -(-step.kv_lens // PAGE_SIZE) - n_shared
    n_pages = int(counts.sum()) + n_shared + 1
    order = np.random.default_rng(0).permutation(np.arange(1, n_pages))
    table = np.zeros((MAX_NUM_SEQS + 1, int(counts.max()) + n_shared), np.int32)
    for slot, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[slot, :n_shared] = order[len(order) - n_shared :]
        table[slot, n_shared : n_shared + count] = order[end - count : end]
    n_bytes = (int(step.kv_lens.sum()) - step.n_shared * (n_spans - (step.n_shared > 0))) * KEY_BYTES
    shape = (2, n_pages, N_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    n_layers = min(max(2, -(-L2_BYTES // n_bytes)), 64)
    pages = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(n_layers)]
    shared = [SharedPrefix(range(n_spans), step.n_shared)] if step.n_shared else []
    where = np.arange(n_spans + 1, dtype=np.int32), step.kv_lens, np.arange(n_spans, dtype=np.int32)
    pages_of = torch.from_numpy(table).cuda()
    heads = {"page_size": PAGE_SIZE, "n_q_heads": N_Q_HEADS, "n_kv_heads": N_KV_HEADS, "head_dim": HEAD_DIM}
    like = attention.plan(*where, pages_of, **heads)
    if shared:
        few = small_rows_of(like.heads.group) // like.heads.group
        max_large = 2 * MAX_NUM_SEQS // (few + 1) + 1
        buffers = plan_buffers(like, MAX_NUM_SEQS, max_large=max_large, max_rows=MAX_NUM_SEQS)
    else:
        buffers = plan_buffers(like, MAX_NUM_SEQS, span_tokens=1)
    plan = attention.plan(*where, pages_of, **heads, buffers=buffers, shared=shared)
    q = torch.randn(n_spans, N_Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    return Layers(plan, q, pages, torch.empty_like(q), n_bytes)


@contextlib.contextmanager
def only(kernel: str) -> Iterator[None]:
    """Only this kernel is launched."""
    launches = hopper._launches
    hopper._launches = lambda *args: [one for one in launches(*args) if one[0].endswith(kernel)]
    yield
    hopper._launches = launches


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    names = parser.parse_args().only.split(",")
    for name, step in steps().items():
        if names != [""] and name not in names:
            continue
        layers = prepare(step)
        whole = layers.seconds()
        text = f"{name:10} {whole * 1e6:7.1f} us {layers.n_bytes / whole / 1e12:5.2f} TB/s"
        for kernel in KERNELS:
            if getattr(layers.plan.work, f"n_{kernel}" if kernel != "merge" else "n_merges"):
                with only(kernel):
                    text += f"  {kernel} {layers.seconds() * 1e6:.1f}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
