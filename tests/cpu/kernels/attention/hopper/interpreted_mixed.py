"""Run by `test_decode_hopper.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np
import pytest
import quick_interpreter  # noqa: F401
import torch
from emulated_decode import emulate
from paged_case import PagedCase, worst_error

from quire.kernels import jit
from quire.kernels.attention import coded, reference
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import SharedPrefix
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

SCALES = entry.Scales(0.5, 1.75)


def check() -> None:
    spans = [(1030 + i, 1) for i in range(20)]
    case = PagedCase(
        spans, 16, 1, 4, 64, torch.float16, shared=[SharedPrefix(range(20), 1024)], kv_dtype=E4M3
    )  # fmt: skip
    variant = Variant(case.scale)
    bare = case.bare_plan(variant)
    plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=8))
    assert plan.work.n_small and plan.work.n_large and plan.work.n_merges
    out, lse = torch.full_like(case.q, 7.0).contiguous(), torch.full(case.q.shape[:2], 7.0)
    coded.run(case.q, case.k, case.v, plan, variant, out, lse, SCALES)
    wanted, wanted_lse = out.double(), lse.double()
    keys, values = case.k.double() * SCALES.k, case.v.double() * SCALES.v
    reference.run(case.q.double(), keys, values, plan, variant, wanted, wanted_lse)
    assert worst_error(out[: case.n_rows], wanted[: case.n_rows]) <= reference.TOLERANCE[case.dtype]
    assert worst_error(lse[: case.n_rows], wanted_lse[: case.n_rows]) <= 1e-4


if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        emulate(pathlib.Path(sys.argv[1]), patch, str(jit.compiler("c++")))
        check()
    print("fine")
