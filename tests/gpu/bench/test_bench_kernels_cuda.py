"""The kernel benchmark on a GPU: a short run in which every implementation takes part."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from quire.bench.kernels import measurement, session
from quire.bench.kernels.case import Setting
from quire.bench.kernels.measurement import Progress
from quire.bench.kernels.timing import timer
from quire.bench.options import KernelBenchOptions
from quire.cli.main import main
from quire.kernels import catalog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_run(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "k.json"
    chosen = "decode 16 x 1k,prefill 1k,plan 256,rms_norm,rotate_and_store,silu_mul,copy_pages,greedy"
    assert main(["bench", "kernels", "--device", "cuda", "--cases", chosen, "--output", str(report)]) == 0
    rows = json.loads(report.read_text())["results"]["times"]
    assert {row["op"] for row in rows} == {"attention", "norm", "qkv", "act", "kvstore", "sample"}
    ours = [row for row in rows if not row["is_peer"] and row["share"] is not None]
    assert {"triton"} <= {row["implementation"] for row in ours}
    assert all(row["share"] > 0 for row in ours)


def test_checks_are_of_the_kernels_that_are_timed() -> None:
    """None of ours for Hopper refuses the sizes of its check."""
    timed = (
        "qwen3-30b-a3b, 32 rows,qwen3-30b-a3b, 2048 rows,router and choice of 32,scan_delta,decode 64 x 4k, 16 heads"
    )
    setting = Setting(timer("cuda"), torch.bfloat16)
    _, checks = session.chosen(KernelBenchOptions(ops="moe,mla,state", cases=timed), setting)
    rows = measurement.check_all(checks, Progress())
    assert [row for row in rows if row.bad] == []
    made = {(row.op, row.implementation) for row in rows if row.good}
    assert {("moe", "triton"), ("mla", "latent"), ("state", "triton")} <= made
    if catalog.hopper_obstacle() is None:
        assert {("moe", "hopper"), ("moe", "hopper-router"), ("mla", "hopper-latent")} <= made
        assert not [row for row in rows if row.note and row.op == "moe"]
