"""Dense attention and its gradients on a real GPU: against float64 autograd, the same bits twice, memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from flash_case import VARIANTS, Case, check

from quire.kernels.attention.variant import Variant
from quire.kernels.flash import flash_attention

pytestmark = pytest.mark.gpu

Attend = Callable[..., torch.Tensor]
ASKED_FOR = "requested_bytes.all"
"""Of the allocator's figures the one that does not depend on which cached blocks it finds."""
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RANDOM = [(name, BF16, 128) for name in VARIANTS]
RANDOM += [(name, F16, 64) for name in ("causal", "sinks")] + [(name, F32, 64) for name in ("causal", "mask")]
HEAD_DIMS = [(BF16, d) for d in (16, 64, 80, 96, 192, 256)] + [(F16, 256), (F32, 96), (F32, 256)]


@pytest.mark.parametrize(("variant", "dtype", "head_dim"), RANDOM, ids=str)
def test_random_shapes_match_float64(variant: str, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    draw = random.Random(f"{variant} {dtype}")
    for q_len, kv_len in [(1, 300), (257, 257), (700, 900), (500, 313), (130, 1)]:
        n_kv_heads = draw.choice([1, 2, 3])
        n_q_heads = n_kv_heads * draw.choice([1, 2, 5])
        check(Case(variant, draw.choice([1, 2]), q_len, kv_len, n_q_heads, n_kv_heads, head_dim), dtype, "cuda")


@pytest.mark.parametrize(("dtype", "head_dim"), HEAD_DIMS, ids=str)
def test_head_dims_match_float64(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    check(Case("causal", 2, 300, 411, 4, 2, head_dim), dtype, "cuda")


def test_ragged_sequences_equal_each_alone() -> None:
    torch.manual_seed(0)
    lengths = [700, 1, 0, 300]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (
        torch.randn(sum(lengths), h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2)
    )
    out = flash_attention(q, k, v, Variant(0.125), q_indptr=bounds, kv_indptr=bounds)
    seed = torch.randn_like(out)
    slopes = torch.autograd.grad(out, (q, k, v), seed)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        part = [x[None, begin:end].detach().requires_grad_() for x in (q, k, v)]
        alone = flash_attention(*part, Variant(0.125))
        assert torch.equal(alone[0], out[begin:end])
        for slope, one in zip(slopes, torch.autograd.grad(alone, part, seed[None, begin:end]), strict=True):
            assert torch.equal(slope[begin:end], one[0])


def test_two_runs_give_the_same_bits() -> None:
    torch.manual_seed(0)
    inputs = Case("causal", 2, 2000, 2000, 16, 2, 128).inputs(torch.bfloat16, "cuda")
    seed = torch.randn_like(inputs[0])
    first, second = (torch.autograd.grad(flash_attention(*inputs, Variant(0.1)), inputs, seed) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def peak_bytes(attend: Attend, length: int) -> int:
    """What a forward and a backward pass hold at most beside their inputs.

    The passes that are measured are not the first at this length: what stays for good (compiled kernels, workspaces,
    the inputs' gradients, which later passes add to) is there before, and what nobody holds any more is gone.
    """
    inputs = Case("causal", 1, length, length, 4, 4, 64).inputs(torch.bfloat16, "cuda")
    peaks = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()[f"{ASKED_FOR}.current"]
        attend(*inputs).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_stats()[f"{ASKED_FOR}.peak"] - before)
    assert peaks[1] == peaks[2], "the same work, the same memory"
    return peaks[2]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with all its probabilities in memory, which is what must not happen."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(2, 3) * 0.125).softmax(-1) @ v).transpose(1, 2)


def test_memory_grows_linearly() -> None:
    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return flash_attention(*inputs, Variant(0.125))

    peaks = {length: peak_bytes(attend, length) for length in (32768, 8192, 16384)}
    assert peaks[16384] < 2.1 * peaks[8192] and peaks[32768] < 2.1 * peaks[16384], peaks
    assert peaks[32768] < 12 * 32768 * 4 * 64 * 2, "more than a few tensors like q"


def test_memory_that_grows_quadratically_is_seen() -> None:
    """The measure itself: rows times keys would fail the test above, by its first condition and by its second."""
    peaks = {length: peak_bytes(plain, length) for length in (4096, 2048)}
    assert peaks[4096] > 3 * peaks[2048], peaks
    assert peaks[4096] > 12 * 4096 * 4 * 64 * 2
