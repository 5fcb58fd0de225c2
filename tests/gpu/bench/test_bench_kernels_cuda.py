"""The kernel benchmark on a GPU: a short run in which every implementation takes part."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from quire.cli.main import main

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
