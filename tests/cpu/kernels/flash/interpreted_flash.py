"""Run by `test_flash.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import numpy as np
import quick_interpreter  # noqa: F401
import torch
from flash_case import Case, check

from quire.kernels import selector
from quire.kernels.attention.variant import Variant
from quire.kernels.flash import flash_attention, reference, triton

F32, F16 = torch.float32, torch.float16
CASES = [
    (Case("causal", 1, 75, 75, 2, 1, 16), F32),
    (Case("causal", 1, 20, 55, 1, 1, 24), F16),
    (Case("causal", 1, 50, 20, 1, 1, 16), F32),
    (Case("causal", 2, 1, 1, 1, 1, 16), F32),
    (Case("full", 1, 37, 64, 2, 2, 16), F16),
    (Case("window", 1, 70, 90, 1, 1, 16), F32),
    (Case("full window", 1, 60, 70, 1, 1, 16), F32),
    (Case("sinks", 1, 90, 120, 1, 1, 16), F32),
    (Case("soft-cap", 1, 50, 70, 2, 1, 16), F32),
    (Case("alibi", 1, 40, 50, 2, 2, 16), F16),
    (Case("mask", 2, 33, 40, 1, 1, 16), F32),
    (Case("own", 1, 70, 70, 2, 1, 16), F32),
]


def check_ragged() -> None:
    """Sequences behind each other, one of them empty."""
    variant = Variant(0.25)
    q_bounds, kv_bounds = torch.tensor([0, 20, 20, 53]), torch.tensor([0, 31, 40, 73])
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((53, 2), (73, 1), (73, 1)))
    out = flash_attention(q, k, v, variant, q_indptr=q_bounds, kv_indptr=kv_bounds)
    seed = torch.randn_like(out)
    slopes = torch.autograd.grad(out, (q, k, v), seed)
    for i in (0, 2):
        rows, keys = (slice(int(b[i]), int(b[i + 1])) for b in (q_bounds, kv_bounds))
        part = [x[at].detach().double()[None].requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))]
        expected, _ = reference.flash_attention(*part, variant)
        right = torch.autograd.grad(expected, part, seed[None, rows].double())
        torch.testing.assert_close(out[rows].double(), expected[0], rtol=0, atol=5e-6)
        for slope, at, one in zip(slopes, (rows, keys, keys), right, strict=True):
            torch.testing.assert_close(slope[at].double(), one[0], rtol=0, atol=2e-5)
    assert not slopes[1][31:40].any(), "keys of a sequence without queries have a gradient"


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    selector.select = lambda op, function, x: getattr(triton, function)
    triton.FLOAT32_BLOCKING = {64: (32, 16, 4, 1)}
    triton.BLOCKING = {
        "forward": {64: (16, 32, 4, 1)},
        "backward_keys": {64: (16, 32, 4, 1)},
        "backward_queries": {64: (32, 16, 4, 1)},
    }
    with np.errstate(all="ignore"):
        for case, dtype in CASES:
            check(case, dtype)
        check_ragged()
    print("fine")
