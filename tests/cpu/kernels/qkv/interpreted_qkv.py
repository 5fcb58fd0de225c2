"""Run by `test_kernel_qkv.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import interpreted_codes  # noqa: F401
import numpy as np
import quick_interpreter  # noqa: F401
import torch
from qkv_case import Shape, arguments, check, check_codes, check_integers, copied

from quire.kernels.norm import triton as norm
from quire.kernels.qkv import reference, triton

SHAPES = (
    Shape(0, 2, 1, 16, 16),
    Shape(1, 16, 8, 128, 128),
    Shape(5, 12, 3, 80, 80, page_size=4, n_padding=2, wide_positions=False),
    Shape(6, 9, 9, 80, 20, q_norm=False, page_size=1),
    Shape(4, 6, 2, 64, 64, q_norm=False, k_norm=False, n_padding=4),
    Shape(3, 3, 1, 256, 2, k_norm=False),
    Shape(3, 4, 4, 24, 0),
)


def check_composition() -> None:
    """Rounds where `rms_norm` rounds: with a table that turns nothing, a head is what that makes of it."""
    for dtype in (torch.float32, torch.float16):
        given = arguments(Shape(9, 6, 2, 48, 32), dtype)
        still = torch.cat((torch.ones(500, 16), torch.zeros(500, 16)), dim=1)
        kept = copied(given)
        q, _, _ = reference.split(kept[0], kept[6])
        got = triton.rotate_and_store(*given[:5], still, *given[6:])
        equal = (got == norm.rms_norm(q, kept[1], kept[3])).double().mean()
        assert float(equal) > (0.999 if dtype == torch.float16 else 0.7), float(equal)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):
        for shape in SHAPES:
            for dtype in (torch.float32, torch.float16):
                check(triton.rotate_and_store, shape, dtype)
                check_codes(triton.rotate_and_store, shape, dtype)
                check_integers(triton.rotate_and_store, shape, dtype)
        check_composition()
    print("fine")
