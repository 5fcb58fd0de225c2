"""Run by `test_numerics.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels"))

import numpy as np
import quick_interpreter  # noqa: F401
import torch

from quire.bench.numerics import attention
from quire.bench.numerics.deviation import BASELINE, OURS, ROUNDED
from quire.kernels import catalog
from quire.kernels.attention import op
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import Heads

LENGTH = 130


def check() -> None:
    """The lists of work are those of a GPU, the memory is the CPU's."""
    op.WORK = {"cpu": work.make}
    triton = dataclasses.replace(catalog.entry("attention", "triton"), machine_obstacle=lambda: None)
    cpu, skipped = torch.device("cpu"), dict[str, str]()
    listed = [attention.paths(cpu)[0], *attention.paths_of(triton, "cuda")]
    sample = attention.random_sample(Heads(4, 2, 16), LENGTH, seed=0)
    rows = attention.rows(sample, "fp16", listed, cpu, skipped)
    found = {(row.path, row.tile): row for row in rows}
    assert not skipped, skipped
    names = {"triton", "triton, last row alone", "triton, batch invariant", "triton, float8_e4m3fn keys"}
    assert names <= {path for path, _ in found} and ("triton", "8 pieces") in found, list(found)
    for row in found.values():
        assert row.kind in (BASELINE, OURS, ROUNDED) and row.times_baseline is not None
        if row.kind == OURS:
            assert 0 < row.times_baseline < 1.5, row
        if row.kind == ROUNDED:
            assert 1e-3 < row.deviation.mean_abs < 0.1, row


if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"), torch.inference_mode():
        check()
    print("fine")
