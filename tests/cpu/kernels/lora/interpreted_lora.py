"""Run by `test_kernel_lora.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import numpy as np
import quick_interpreter  # noqa: F401
import torch
from lora_case import CASES, Made

from quire.kernels.lora import reference, triton

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        made = Made(case)
        y, expected = made.y.clone(), made.expected()
        triton.add(made.x, made.stack, made.tiles(made.places), y, made.norm)
        error = ((y - expected).abs() / (1 + expected.abs())).max()
        assert error <= reference.TOLERANCE[case.dtype], (case, error)
        without = torch.from_numpy(made.places < 0)
        assert torch.equal(y[without], made.y[without])
        assert not torch.equal(y, made.y)
        for row in (0, len(y) - 1):  # by itself it has the same bits
            if case.places[row] >= 0:
                alone, places = made.y.clone(), np.full(len(y), -1, np.int32)
                places[row] = case.places[row]
                triton.add(made.x, made.stack, made.tiles(places), alone, made.norm)
                assert torch.equal(alone[row], y[row]), (case, row)
    print("fine")
