"""Run by `test_kernel_mla.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import numpy as np
import quick_interpreter  # noqa: F401
import torch
from latent_case import Latent, attend, check_store

from quire.kernels.attention import reference
from quire.kernels.attention.triton import latent
from quire.kernels.mla import triton as mla

CASES = (
    Latent([(130, 1), (9, 1), (1, 1), (300, 1)], seed=1),
    Latent([(130, 1), (9, 9), (150, 3), (60, 30)], n_heads=3, rank=24, rope=8, page_size=7, seed=2),
    Latent([(200, 1), (17, 5)], n_heads=20, rank=32, rope=4, seed=3),
    Latent([(170, 2), (160, 1), (165, 1)], n_shared=128, seed=4),
    Latent([(70, 1), (40, 2)], n_heads=16, dtype=torch.float16, page_size=48, seed=5),
    Latent([(64, 1), (33, 2)], n_heads=128, seed=6),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):
        for case in CASES:
            for n_ctas in (2, 7):
                attend(case, latent.run, reference.TOLERANCE[case.dtype], n_ctas)
        for dtype in (torch.float32, torch.float16):
            check_store(mla.store, dtype)
        check_store(mla.store, torch.float32, n=3, n_heads=17, rank=24, d=4)
    print("fine")
