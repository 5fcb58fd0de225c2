"""The kernel of small lines for Hopper without a GPU: emulated on the host, against float64, with pages of q's type
and of e4m3.

Not shown: how fast it is, that copies are ordered as on a GPU, dependent launch.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from emulated_decode import emulate
from paged_case import VARIANTS, PagedCase, worst_error

from quire.kernels import jit
from quire.kernels.attention import coded, reference
from quire.kernels.attention.hopper import launcher
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import Layout
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

HERE = pathlib.Path(__file__).resolve().parent
BF16, HALF, CODES = torch.bfloat16, torch.float16, {"kv_dtype": E4M3}
SCALES = entry.Scales(0.5, 1.75)


@dataclasses.dataclass(frozen=True)
class One:
    spans: list[tuple[int, int]]
    page_size: int
    group: int
    head_dim: int
    dtype: torch.dtype
    variant: str = "causal"
    n_ctas: int = 2
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = (  # ends inside pages, split lines, windows, lines of several rows, pages smaller than a stage and larger
    One([(150, 1), (1, 1)], 16, 4, 128, BF16, others=CODES),
    One([(300, 1)], 8, 2, 64, HALF, "window", others=CODES),
    One([(140, 3)], 256, 5, 96, BF16, others=CODES),
    One([(70, 1)], 16, 2, 192, BF16, "custom_mask", n_ctas=1, others=CODES | {"layout": Layout.SPARSE}),
    One([(40, 2)], 32, 3, 256, BF16, n_ctas=1, others=CODES),
    One([(77, 2)], 16, 4, 128, BF16),
)


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path, monkeypatch)


def test_small_lines_match_float64(emulation: None) -> None:
    for seed, one in enumerate(CASES):
        case = PagedCase(one.spans, one.page_size, 1 + seed % 2, one.group, one.head_dim, one.dtype, seed, **one.others)
        variant: Variant = VARIANTS[one.variant](np.random.default_rng(seed), case)
        bare = case.bare_plan(variant)
        plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=one.n_ctas))
        assert plan.work.n_small and not plan.work.n_large
        kind, scales = (coded, (SCALES,)) if case.k.dtype == E4M3 else (launcher, ())
        assert kind.static_obstacle(plan, variant, case.dtype, case.k.dtype) is None
        out, lse = torch.full_like(case.q, 7.0).contiguous(), torch.full(case.q.shape[:2], 7.0)
        kind.run(case.q, case.k, case.v, plan, variant, out, lse, *scales)
        wanted, wanted_lse = out.double(), lse.double()
        numbers = [x.double() * (scale if scales else 1.0) for x, scale in zip((case.k, case.v), SCALES, strict=True)]
        reference.run(case.q.double(), *numbers, plan, variant, wanted, wanted_lse)
        assert worst_error(out, wanted) <= 2 * reference.TOLERANCE[case.dtype], one
        assert worst_error(lse, wanted_lse) <= 1e-3, one


def test_parts_of_both_back_ends_are_merged(tmp_path: pathlib.Path) -> None:
    """A shared prefix by Triton's kernel, interpreted, the rest and the merge by decode.cu: in a process of its own."""
    pytest.importorskip("triton")
    if jit.compiler("c++") is None:
        pytest.skip("needs a C++ compiler")
    paths = [str(HERE.parents[4]), str(HERE), str(HERE.parents[1])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / "interpreted_mixed.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
