"""Run by `test_kernel_moe.py` in a process of its own, with TRITON_INTERPRET=1: the kernels against the reference."""

from __future__ import annotations

import pathlib
import sys
import types

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

import adapted_expert_case
import coded_experts
import interpreted_codes  # noqa: F401
import quick_interpreter  # noqa: F401
import route_cases

from quire.config.experts import Gating
from quire.kernels import lora
from quire.kernels.lora import triton as lora_kernels
from quire.kernels.moe import reference
from quire.kernels.moe import triton as moe

SIZES = ((1, 2, 4, 64, 48), (5, 3, 5, 80, 32), (70, 1, 2, 32, 80), (9, 2, 40, 16, 16))
"""Tokens, chosen experts, experts, hidden size, inner size."""


def check_experts() -> None:
    for dtype in (torch.float32, torch.float16):
        for n, k, n_experts, hidden, inner in SIZES:
            for gating in (Gating(), Gating(slope=1.702, offset=1.0, limit=1.0)):
                biased = gating.offset > 0
                x = torch.randn(n, 2 * hidden, dtype=dtype)[:, :hidden]
                ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
                ids[n // 2, 0] = -1
                if n > 50:
                    ids[:] = 1  # all to one
                weights = torch.rand(n, k)
                up, down = torch.randn(n_experts, 2 * inner, hidden) * 0.2, torch.randn(n_experts, hidden, inner) * 0.2
                biases = (torch.randn(n_experts, 2 * inner), torch.randn(n_experts, hidden)) if biased else (None, None)
                parts = [None if one is None else one.to(dtype) for one in (up, down, *biases)]
                wide = [None if one is None else one.double() for one in parts]
                residual = torch.randn(n, hidden, dtype=dtype)
                expected = reference.experts(x.double(), ids, weights, *wide[:2], gating, *wide[2:])
                for target in ("none", "out", "residual"):
                    before = residual.clone()
                    out = torch.full_like(residual, torch.nan)
                    given = {"out": {"out": out}, "residual": {"residual": before}}.get(target, {})
                    got = moe.experts(x, ids, weights, *parts[:2], gating, *parts[2:], **given)
                    assert target == "none" or got is next(iter(given.values()))
                    close(got, expected, residual if target == "residual" else None)


def check_codes() -> None:
    n, k, n_experts, hidden, inner = 9, 2, 3, 320, 160
    for number, coding in enumerate(coded_experts.CODINGS):
        dtype = torch.float16 if number % 2 else torch.float32
        up, down = (coding.matrices(n_experts, *size, dtype) for size in ((2 * inner, hidden), (hidden, inner)))
        x, biases = torch.randn(n, hidden, dtype=dtype), (None, None)
        if number % 3 == 0:
            biases = torch.randn(n_experts, 2 * inner, dtype=dtype), torch.randn(n_experts, hidden, dtype=dtype)
        ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
        weights, gating = torch.rand(n, k), Gating(slope=1.702, offset=1.0, limit=1.0)
        arguments = (x, ids, weights, up, down, gating, *biases)
        close(moe.experts(*arguments), coded_experts.expected(*arguments))


def check_adapters() -> None:
    """Rows without an adapter are those of `experts`, bit for bit. The small products are Triton's too."""
    moe.lora = types.SimpleNamespace(**vars(lora) | {"add": lora_kernels.add})
    for n, k, n_experts, hidden, inner, n_places in ((1, 2, 4, 64, 48, 1), (40, 2, 3, 80, 32, 2)):
        for dtype in (torch.float32, torch.float16):
            x, weights = torch.randn(n, hidden, dtype=dtype), torch.rand(n, k)
            ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
            ids[n // 2, 0] = -1
            gating = Gating(slope=1.702, offset=1.0, limit=1.0) if n > 1 else Gating()
            up = (torch.randn(n_experts, 2 * inner, hidden) * 0.2).to(dtype)
            down = (torch.randn(n_experts, hidden, inner) * 0.2).to(dtype)
            own = adapted_expert_case.made(n, n_places, n_experts, hidden, inner, dtype)
            if n == 1:
                own.places[:] = 0
            given = x, ids, weights, up, down
            expected = reference.adapted_experts(x.double(), ids, weights, up, down, own, gating)
            got = moe.adapted_experts(*given, own, gating)
            close(got, expected)
            without = own.places < 0
            assert torch.equal(got[without], moe.experts(*given, gating)[without])
            assert not torch.equal(got, moe.experts(*given, gating))
            residual = torch.randn(n, hidden, dtype=dtype)
            before = residual.clone()
            close(moe.adapted_experts(*given, own, gating, residual=residual), expected, before)


def check_adapters_of_rounding_experts() -> None:
    """What adapters multiply is not rounded."""
    moe.lora = types.SimpleNamespace(**vars(lora) | {"add": lora_kernels.add})
    n, k, n_experts, hidden, inner = 9, 2, 3, 192, 160
    for coding in (one for one in coded_experts.CODINGS if one.dtype == torch.float8_e4m3fn):
        up, down = (coding.matrices(n_experts, *size, torch.float32) for size in ((2 * inner, hidden), (hidden, inner)))
        own = adapted_expert_case.made(n, 2, n_experts, hidden, inner, torch.float32)
        ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
        given = torch.randn(n, hidden), ids, torch.rand(n, k), up, down
        exact = torch.zeros(n, hidden, dtype=torch.float64)
        close(
            moe.adapted_experts(*given, own, Gating()), reference.adapted_experts(*given, own, Gating(), residual=exact)
        )


def close(got: torch.Tensor, expected: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    error = coded_experts.error(got, expected, residual)
    assert error <= reference.TOLERANCE[got.dtype], (error, got.shape, got.dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        route_cases.check(moe.route, reference.route, reference.ROUTE_TOLERANCE)
        check_experts()
        check_codes()
        check_adapters()
        check_adapters_of_rounding_experts()
    print("fine")
