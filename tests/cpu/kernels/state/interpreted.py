"""Run by `test_kernel_state_triton.py` in a process of its own, in Triton's interpreter."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
import quick_interpreter  # noqa: F401
import state_case
import torch

from quire.kernels.state import reference
from quire.kernels.state.triton import launcher


def check(name: str, **shape: int) -> None:
    for single in (True, False):
        case = state_case.CASES[name](single=single, **shape)
        y, state = case.run(getattr(reference, name))
        for dtype in (torch.float32, torch.float16):
            states = dtype if name == "convolve" else torch.float32
            got, left = case.to(dtype, states).run(getattr(launcher, name))
            errors = state_case.error(got, y), state_case.error(left, state)
            assert max(errors) <= reference.TOLERANCE[dtype], (name, single, dtype, errors)


def check_gate() -> None:
    wide = torch.randn(5, 2 * 60, dtype=torch.float64) * 2
    for n_weights, first in ((60, True), (20, False)):
        weight = torch.randn(n_weights, dtype=torch.float64)
        expected = reference.norm_gated(wide[:, :60], wide[:, 60:], weight, 1e-5, 20, first)
        for dtype in (torch.float32, torch.float16):
            y, gate = wide.to(dtype).split([60, 60], dim=1)
            got = launcher.norm_gated(y, gate, weight.to(dtype), 1e-5, 20, first)
            assert state_case.error(got, expected) <= reference.TOLERANCE[dtype]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        check_gate()
        check("convolve")
        check("convolve", columns=130, k=3, silu=False, bias=False)
        check("scan_ssm", heads=2, groups=1, p=12, s=20)
        check("scan_delta", key_heads=1, heads=2, d=20, e=12)
    print("fine")
