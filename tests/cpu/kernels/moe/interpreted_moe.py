"""Run by `test_kernel_moe.py` in a process of its own, with TRITON_INTERPRET=1: the kernels against the reference."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import quick_interpreter  # noqa: F401

from quire.config.experts import Gating, RoutingSpec, Scores
from quire.kernels.moe import reference
from quire.kernels.moe import triton as moe

ROUTINGS = (
    (4, RoutingSpec(n_chosen=1)),
    (60, RoutingSpec(n_chosen=4, renormalise=True)),
    (64, RoutingSpec(n_chosen=6, n_groups=8, n_chosen_groups=3, scale=2.5)),
    (24, RoutingSpec(n_chosen=3, scores=Scores.SIGMOID, renormalise=True, n_groups=3, n_chosen_groups=2)),
    (32, RoutingSpec(n_chosen=4, scores=Scores.SIGMOID, n_groups=4, n_chosen_groups=2, n_group_best=2)),
    (9, RoutingSpec(n_chosen=2, scores=Scores.EVEN)),
    (16, RoutingSpec(n_chosen=2, scores=Scores.SPARSE_MIXER, mixer_margin=0.02)),
)  # fmt: skip
SIZES = ((1, 2, 4, 64, 48), (5, 3, 5, 80, 32), (70, 1, 2, 32, 80), (9, 2, 40, 16, 16))
"""Tokens, chosen experts, experts, hidden size, inner size."""


def check_route() -> None:
    for n_experts, routing in ROUTINGS:
        for corrected in (False, True):
            logits = torch.randn(5, n_experts) * 3
            logits[0, 1] = torch.nan
            logits[1] = 0.0
            is_possible = corrected and routing.scores is not Scores.SPARSE_MIXER
            correction = torch.randn(n_experts) if is_possible else None
            load, expected_load = (torch.ones(n_experts, dtype=torch.int64) for _ in range(2))
            ids, weights = moe.route(logits, routing, correction, load)
            expected_ids, _ = reference.route(logits, routing, correction, expected_load)
            assert torch.equal(load, expected_load) and int(load.sum()) == ids.numel() + n_experts
            assert torch.equal(ids, expected_ids), (routing, ids, expected_ids)
            error = (weights - reference.route(logits.double(), routing, correction)[1]).abs().max()
            assert float(error) <= reference.ROUTE_TOLERANCE * routing.scale, (routing, error)


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
                    close(got, expected + residual.double() if target == "residual" else expected)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = float(((got.double() - expected).abs() / (1 + expected.abs())).max())
    assert error <= reference.TOLERANCE[got.dtype], (error, got.shape, got.dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        check_route()
        check_experts()
    print("fine")
