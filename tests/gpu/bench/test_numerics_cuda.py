"""`quire doctor numerics` on a GPU: the CUDA C++ and the Triton kernels have their rows, and the model runs there."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from quire.cli.main import main
from quire.kernels import catalog

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_demo_model(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "it.json"
    words = ["--device", "cuda", "--dtype", "bf16", "fp32", "--lengths", "16", "1024", "--json", str(out)]
    assert main(["doctor", "numerics", *words]) == 0
    rows = json.loads(out.read_text())["results"]["rows"]
    paths = {row["path"] for row in rows}
    for one in catalog.runnable("attention", "cuda", "run"):
        if one.name == "hopper-e4m3":
            low = f"{one.name}, float8_e4m3fn keys"
            assert {low, f"{low}, last row alone"} <= paths
            continue
        if one.name in ("latent", "hopper-latent"):  # the demo has none
            continue
        assert one.name in paths, paths
        if one.name != "reference":
            assert {f"{one.name}, last row alone", f"{one.name}, batch invariant"} <= paths
    assert "triton, float8_e4m3fn keys" in paths
    attention = [row for row in rows if row["kind"] == "ours" and row["part"] == "attention"]
    assert all(row["times_baseline"] < 1.5 for row in attention if row["dtype"] == "bf16"), attention
    assert "all, float8_e4m3fn keys" in paths
    whole = [row for row in rows if row["path"] == "all"]
    assert whole and all(row["best_agreement"] > 0.9 for row in whole), whole
