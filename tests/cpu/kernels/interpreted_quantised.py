"""Run by `test_w8a8_w4a16_mxfp4.py` in a process of its own, with TRITON_INTERPRET=1: kernels against references."""

from __future__ import annotations

import interpreted_codes  # noqa: F401
import numpy as np
import quantised_case as case
import quick_interpreter  # noqa: F401
import torch

from quire.kernels.mxfp4 import reference as fp4_reference
from quire.kernels.mxfp4 import triton as fp4
from quire.kernels.w4a16 import reference as int4_reference
from quire.kernels.w4a16 import triton as int4
from quire.kernels.w8a8 import reference, triton

SIZES = ((1, 70, 200), (17, 34, 136), (5, 140, 320))
"""Rows of x, of the matrix, columns."""


def check(dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x = case.rows(m, k, dtype)
    alls = [(triton.linear_fp8, reference.linear_fp8, (*case.fp8(n, k, one), None)) for one in ("tensor", "blocks")]
    alls.append((triton.linear_fp8, reference.linear_fp8, (*case.fp8(n, k, "channel"), torch.tensor([0.004]))))
    alls.append((triton.linear_int8, reference.linear_int8, (*case.int8(n, k), None)))
    for group, zeros, order in ((32, False, True), (128, True, False), (k, True, True)):
        weight = case.int4(n, k, group, dtype, zeros=zeros, order=order)
        alls.append((int4.linear, int4_reference.linear, (weight,)))
    alls += [(fp4.linear, fp4_reference.linear, (make(n, k),)) for make in (case.fp4, case.nvfp4)]
    for own, oracle, weight in alls:
        for around in case.arounds(m, n, k, x):
            got, expected = (function(x, *weight, *around.own().arguments) for function in (own, oracle))
            error = case.error(got, expected)
            assert got.dtype == expected.dtype and error <= reference.TOLERANCE[dtype], (own, dtype, m, n, k, error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        for kind, size in ((torch.float32, SIZES[0]), (torch.float16, SIZES[1]), (torch.float16, SIZES[2])):
            check(kind, *size)
