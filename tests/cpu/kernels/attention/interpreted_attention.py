"""Run by `test_attention_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from triton_case import VARIANTS, Case, expected

from quire.kernels.attention import reference
from quire.kernels.attention import triton as attention
from quire.kernels.attention.plan import Layout

MIXED = [(130, 1), (9, 0), (70, 3), (45, 45), (1, 1), (300, 2), (160, 40)]
LAYOUTS = (Layout.PAGED, Layout.RAGGED, Layout.SPARSE)


def check(name: str, case: Case, with_lse: bool = True) -> None:
    """The kernels against the formula by hand."""
    variant, formula = VARIANTS[name](case)
    plan = case.plan()
    assert attention.obstacle(plan, variant, case.dtype, case.kv_dtype) is None
    out = torch.full(case.q.shape, 7.0, dtype=case.dtype)
    lse = torch.full(case.q.shape[:2], 7.0) if with_lse else None
    attention.run(case.q, case.k, case.v, plan, variant, out, lse)
    right, right_lse = expected(case, variant.scale, formula)
    n_rows = len(right)
    error = float((out[:n_rows].double() - right).abs().max())
    # tanh is made from exp here: a soft cap of c adds up to c * 2**-23 to a logit.
    tolerance = reference.TOLERANCE[case.dtype] * max(1.0, float(right.abs().max()) / 4) + 5.0 * 2**-23 * ("cap" in name)
    assert error <= tolerance, (name, case, error)
    assert (out[n_rows:] == 7.0).all(), (name, case, "padding rows were written")
    if lse is not None:
        same = (lse[:n_rows].double() == right_lse) | ((lse[:n_rows].double() - right_lse).abs() < 1e-4)
        assert same.all(), (name, case, lse[:n_rows], right_lse)


def check_variants() -> None:
    """Every variant in every layout, cut into parts."""
    for seed, name in enumerate(VARIANTS):
        layout = LAYOUTS[seed % 3]
        check(name, Case(MIXED, layout, page_size=(16, 7)[seed % 2], seed=seed, tokens_first=seed % 2 == 0))
