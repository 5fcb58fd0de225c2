"""Run by `test_kernel_state_triton.py` in a process of its own, in Triton's interpreter."""

from __future__ import annotations

import pathlib
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import numpy as np
import quick_interpreter  # noqa: F401
import state_case
import torch

from quire.kernels.invariance import rows_alone
from quire.kernels.state import reference, single_rows
from quire.kernels.state.triton import alone, launcher


def check(name: str, module: types.ModuleType = launcher, **shape: int) -> None:
    for single in (True, False):
        case = state_case.CASES[name](single=single, **shape)
        y, state = case.run(getattr(reference, name))
        for dtype in (torch.float32, torch.float16):
            states = dtype if name == "convolve" else torch.float32
            got, left = case.to(dtype, states).run(getattr(module, name))
            errors = state_case.error(got, y), state_case.error(left, state)
            assert max(errors) <= reference.TOLERANCE[dtype], (name, single, dtype, errors)


def check_alone(name: str) -> None:
    """A span's last rows one by one, from its snapshot on, have the bits of the whole span."""
    case = state_case.CASES[name](single=False).to(torch.float32, torch.float32)
    function = getattr(alone, name)
    y, state = case.run(function)
    first, length = sum(state_case.LENGTHS[:4]), state_case.LENGTHS[4]
    left = state.clone()
    left[7] = state[11]  # behind 128 rows
    for row in range(128, length):
        spans = single_rows(torch.tensor([7]), torch.tensor([7 + row]))
        before = tuple(
            x[first + row : first + row + 1] if x is not None and len(x) == len(y) else x for x in case.before
        )
        got, left = state_case.ScanCase(before, left, spans, case.after).run(function)
        assert torch.equal(got[0], y[first + row]), name
    assert torch.equal(left[7], state[7]), name


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
        with rows_alone():
            check("scan_ssm", alone, heads=2, groups=1, p=12, s=20)
            check("scan_delta", alone, key_heads=1, heads=2, d=20, e=12)
            check_alone("scan_ssm")
            check_alone("scan_delta")
    print("fine")
