"""Logprobs on a GPU: the kernels against the oracle, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.sample import lines, reference

pytestmark = pytest.mark.gpu


def make_logits(n_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(n_rows, width, generator=torch.Generator().manual_seed(width)) * 3
    logits[1] = logits[1].round() * 0.0  # zeros of both signs
    logits[2] = logits[2].round()
    logits[3, ::2] = -torch.inf
    logits[3, width - 1] = 1.5
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [9, 1000, 32_000, 151_936])
def test_kernels_equal_the_oracle(width: int, dtype: torch.dtype) -> None:
    logits = make_logits(8, width, dtype)
    targets = torch.tensor([0, width - 1, 3, width - 1, int(logits[4].argmax()), 1, 2, width // 2]).int()
    one = lines(logits[4:5].cuda(), targets[4:5].cuda(), min(width, 5)).cpu()
    for k in {min(k, width) for k in (0, 1, 5, 20, 100)}:
        found, expected = lines(logits.cuda(), targets.cuda(), k).cpu(), reference.lines(logits, targets, k)
        assert torch.equal(found[..., 0], expected[..., 0]), "ranks and ids"
        values, oracle = found.view(torch.float32)[..., 1], expected.view(torch.float32)[..., 1]
        torch.testing.assert_close(values, oracle, rtol=2e-6, atol=2e-6)
        assert torch.equal(one[:, : 1 + k], found[4:5, :6])
        behind = lines(logits.cuda()[1:], targets.cuda()[1:], k).cpu()
        assert torch.equal(behind, found[1:]), "targets that begin anywhere"


def test_nothing_waits_for_the_device() -> None:
    logits, targets = make_logits(8, 5000, torch.bfloat16).cuda(), torch.zeros(8, dtype=torch.int32, device="cuda")
    lines(logits, targets, 5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lines(logits, targets, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
