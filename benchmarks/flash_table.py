"""FlashAttention's own table again (Dao et al. 2022, figure 2 left), and TFLOP/s and memory over the sequence length.

    python -m benchmarks.flash_table --output flash_table.json --plot flash_table.png

The table: attention of GPT-2 medium (length 1024, head_dim 64, 16 heads, batch 64), forward and backward, bfloat16,
random data, no mask: standard attention (matmul, softmax, matmul with autograd) and exact attention in blocks. FLOPs
are those of the matrix products; HBM bytes are read from the memory's counters (dram__bytes) by Nsight Compute in a
process of its own, where it is installed. Times are medians of CUDA events. `--replot FILE` only draws.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.bench.report import build_report, write_report
from quire.kernels.attention.variant import Variant
from quire.kernels.flash import flash_attention

TABLE = {"batch": 64, "length": 1024, "n_heads": 16, "head_dim": 64, "causal": False}
PAPER = {  # A100, float16, table beside figure 2
    "standard": {"gflops": 66.6, "hbm_gb": 40.3, "ms": 41.7},
    "flash": {"gflops": 75.2, "hbm_gb": 4.4, "ms": 7.3},
}
SWEEP_TOKENS, WIDTH = 32768, 2048
"""Tokens of a batch (at least one sequence), and n_heads * head_dim, of the sweep."""
LENGTHS = [1024 << i for i in range(7)]
STANDARD_MOST = 8192
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARK = "frac_kernel"
"""A kernel that nothing else here runs: it separates one implementation from the next in the profiler's list."""

Tensors = list[torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Scores and probabilities in memory."""
    scores = q @ (k * k.shape[-1] ** -0.5).mT
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def quire(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Ours; reads [batch, heads, length, d] as it lies."""
    variant = Variant(q.shape[-1] ** -0.5, causal=causal)
    return flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), variant).transpose(1, 2)


def sdpa(backend: SDPBackend) -> Attend:
    """torch's own, one of its backends."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


IMPLEMENTATIONS: dict[str, Attend] = {
    "standard": standard,
    "quire": quire,
    "torch flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "torch cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
}


def inputs(batch: int, n_heads: int, length: int, head_dim: int) -> tuple[Tensors, torch.Tensor]:
    """q, k, v and the gradient of the output: [batch, n_heads, length, head_dim], random."""
    shape = (batch, n_heads, length, head_dim)
    q, k, v, seed = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], seed


def gflops(batch: int, n_heads: int, length: int, head_dim: int, causal: bool, n_products: float) -> float:
    """Of matrix products [length, head_dim] x [head_dim, length]: two forward, five backward (four if kept)."""
    return n_products * 2 * batch * n_heads * length**2 * head_dim / (2 if causal else 1) / 1e9


def milliseconds(work: Callable[[], object], budget_ms: float = 150.0) -> float:
    """Median time of one call, after warm-up."""
    work()
    times: list[float] = []
    n_repeats = 2
    while len(times) < n_repeats:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        n_repeats = max(3, min(50, int(budget_ms / times[-1])))
    return statistics.median(times)


def measure(name: str, batch: int, n_heads: int, length: int, head_dim: int, causal: bool) -> dict[str, float | str]:
    """Forward alone, forward and backward, and the memory that both take beyond inputs.

    TFLOP/s count two products forward and seven for both, half of each if causal, whatever an implementation computes.
    """
    attend = IMPLEMENTATIONS[name]
    tensors, seed = inputs(batch, n_heads, length, head_dim)
    try:
        both = lambda: torch.autograd.grad(attend(*tensors, causal), tensors, seed)  # noqa: E731
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        peak = torch.cuda.max_memory_allocated() - before
        with torch.no_grad():
            forward_ms = milliseconds(lambda: attend(*tensors, causal))
        both_ms = milliseconds(both)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {"error": str(error).splitlines()[0]}
    work = [gflops(batch, n_heads, length, head_dim, causal, n) for n in (2, 7)]
    return {
        "forward_ms": forward_ms, "ms": both_ms, "peak_bytes": peak,
        "forward_tflops": work[0] / forward_ms, "tflops": work[1] / both_ms,
    }  # fmt: skip


def one_of_each() -> None:
    """What the profiler looks at: one forward and backward of the table's shape by each implementation."""
    shape = {name: value for name, value in TABLE.items() if name != "causal"}
    tensors, seed = inputs(**shape)
    mark = torch.zeros(1, device="cuda")
    torch.autograd.grad(quire(*tensors, False), tensors, seed)
    torch.cuda.synchronize()
    for attend in IMPLEMENTATIONS.values():
        torch.frac(mark)
        torch.autograd.grad(attend(*tensors, False), tensors, seed)
    torch.cuda.synchronize()


def hbm_bytes() -> dict[str, dict[str, float]] | str:
    """Implementation → bytes read and written, from the counters; or why there are none."""
    if shutil.which("ncu") is None:
        return "ncu is not installed"
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--csv", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.flash_table", "--one-of-each"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    names = list(IMPLEMENTATIONS)
    found: dict[str, dict[str, float]] = {name: dict.fromkeys(METRICS, 0.0) for name in names}
    at, marked = -1, ""
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        if MARK in row["Kernel Name"]:
            at, marked = at + (row["ID"] != marked), row["ID"]
        elif at >= 0:
            found[names[at]][row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
    return found if at == len(names) - 1 else f"ncu gave no counters: {(done.stdout + done.stderr)[-300:]}"


def table() -> dict[str, object]:
    """The paper's rows beside ours."""
    counted = hbm_bytes()
    rows: dict[str, object] = {}
    print(f"{'':12s} {'GFLOPs':>8s} {'HBM GB':>8s} {'ms':>8s}")
    for name in IMPLEMENTATIONS:
        row: dict[str, object] = dict(measure(name, **TABLE))
        row["gflops"] = gflops(**TABLE, n_products=6 if name == "standard" else 7)
        row["hbm_bytes"] = counted[name] if isinstance(counted, dict) else None
        total = sum(counted[name].values()) / 1e9 if isinstance(counted, dict) else math.nan
        print(f"{name:12s} {row['gflops']:8.1f} {total:8.2f} {row.get('ms', math.nan):8.3f}", flush=True)
        rows[name] = row
    source = "ncu" if isinstance(counted, dict) else counted
    return {"shape": TABLE, "rows": rows, "paper_a100": PAPER, "counters": source}


def sweep() -> list[dict[str, object]]:
    """Causal, 1k to 64k."""
    points: list[dict[str, object]] = []
    for head_dim in (64, 128):
        for length in LENGTHS:
            shape = {
                "batch": max(1, SWEEP_TOKENS // length), "n_heads": WIDTH // head_dim, "length": length,
                "head_dim": head_dim, "causal": True,
            }  # fmt: skip
            names = [name for name in IMPLEMENTATIONS if name != "standard" or length <= STANDARD_MOST]
            results = {name: measure(name, **shape) for name in names}
            points.append({**shape, "results": results})
            shown = [f"{name} {r.get('forward_tflops', 0):.0f}/{r.get('tflops', 0):.0f}" for name, r in results.items()]
            print(f"d={head_dim} {length:6d}: {', '.join(shown)} TFLOP/s forward/both", flush=True)
            torch.cuda.empty_cache()
    return points


def plot(report: dict[str, object], path: str) -> None:
    """TFLOP/s of forward and of both, and peak memory, over the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = report["results"]["sweep"]
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    panels = [("forward_tflops", 1.0, "forward, TFLOP/s"), ("tflops", 1.0, "forward + backward, TFLOP/s")]
    for axis, (field, scale, title) in zip(axes, [*panels, ("peak_bytes", 1e9, "peak memory, GB")], strict=True):
        for head_dim, style in ((64, "--"), (128, "-")):
            for color, name in enumerate(IMPLEMENTATIONS):
                here = [p for p in points if p["head_dim"] == head_dim and field in p["results"].get(name, {})]
                values = [p["results"][name][field] / scale for p in here]
                look = {"marker": ".", "color": f"C{color}", "label": f"{name}, d = {head_dim}"}
                axis.plot([p["length"] for p in here], values, style, **look)
        axis.set(title=title, xlabel="sequence length", xscale="log")
        axis.set_xticks(LENGTHS, [f"{n >> 10}k" for n in LENGTHS])
        axis.grid(alpha=0.3)
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=7)
    figure.suptitle(f"Causal attention, {SWEEP_TOKENS} tokens a batch, width {WIDTH}, bfloat16")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="flash_table.json")
    parser.add_argument("--plot", default="")
    parser.add_argument("--replot", default="", help="draw this report instead of measuring")
    parser.add_argument("--one-of-each", action="store_true", help="what the profiler runs")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.one_of_each:
        one_of_each()
        return
    if arguments.replot:
        report = json.loads(pathlib.Path(arguments.replot).read_text())
    else:
        config = {"dtype": "bfloat16", "sweep_tokens": SWEEP_TOKENS, "width": WIDTH}
        report = build_report("flash table", config, {"table": table(), "sweep": sweep()})
        write_report(arguments.output, report)
    if arguments.plot:
        plot(report, arguments.plot)


if __name__ == "__main__":
    main()
