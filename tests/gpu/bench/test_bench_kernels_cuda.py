"""The kernel benchmark on a GPU: its clock, and a short run in which every implementation takes part."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from quire.bench.kernels.limits import measure_limits
from quire.bench.kernels.timing import CudaTimer
from quire.cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_graph_and_single_launches_agree_on_a_long_call() -> None:
    timer = CudaTimer()
    source = torch.randn(1 << 28, device=timer.device)
    target = torch.empty_like(source)
    inside, single = (timer.sample([lambda: target.copy_(source)], 0.1, capture) for capture in (True, False))
    assert inside.median_s == pytest.approx(single.median_s, rel=0.2)
    limits = measure_limits(timer, torch.bfloat16)
    assert 2 * 4 * source.numel() / inside.median_s == pytest.approx(limits.copy_bytes_s, rel=0.15)


def test_a_run(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "k.json"
    chosen = "decode 16 x 1k,prefill 1k,plan 256,rms_norm,rotate_and_store,silu_mul,copy_pages,greedy"
    assert main(["bench", "kernels", "--device", "cuda", "--cases", chosen, "--output", str(report)]) == 0
    rows = json.loads(report.read_text())["results"]["times"]
    assert {row["op"] for row in rows} == {"attention", "norm", "qkv", "act", "kvstore", "sample"}
    ours = [row for row in rows if not row["is_peer"] and row["share"] is not None]
    assert {"triton"} <= {row["implementation"] for row in ours}
    assert all(0 < row["share"] < 1.3 for row in ours), [row for row in ours if not 0 < row["share"] < 1.3]
