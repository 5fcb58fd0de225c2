"""Chains of row kernels that start before their predecessors have ended: the same bits as one kernel at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from quire.kernels import catalog
from quire.kernels.act import silu_mul
from quire.kernels.norm import rms_norm
from quire.kernels.qkv import rotate_and_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(catalog.hopper_obstacle() is not None, reason=str(catalog.hopper_obstacle())),
]
N_Q, N_KV, D, PAGE = 4, 1, 64, 16
WIDTH = (N_Q + 2 * N_KV) * D
ROUNDS = 67
"""Of three launches each."""


def windows(x: torch.Tensor, n: int, width: int) -> torch.Tensor:
    """[n, width] over x's memory: rows overlap, so that a block reads what several blocks have written."""
    return x.as_strided((n, width), ((x.numel() - width) // (n - 1) // 8 * 8, 1))


@dataclasses.dataclass
class Chain:
    """norm -> rotate_and_store -> activation -> norm ..., each from the result of the one before."""

    x: torch.Tensor
    weights: torch.Tensor
    head_weight: torch.Tensor
    positions: torch.Tensor
    cos_sin: torch.Tensor
    cache_locs: torch.Tensor
    pages: torch.Tensor

    @classmethod
    def make(cls, n: int) -> Chain:
        made = torch.Generator("cuda").manual_seed(n)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=made, device="cuda")

        angles = randn(1000, D // 2)
        n_pages = 2 + n // PAGE
        return cls(
            randn(n, WIDTH).bfloat16(),
            randn(ROUNDS, WIDTH).bfloat16(),
            randn(D).bfloat16(),
            torch.randint(0, 1000, (n,), generator=made, device="cuda"),
            torch.cat((angles.cos(), angles.sin()), dim=1),
            PAGE + torch.randperm((n_pages - 1) * PAGE, device="cuda", generator=made)[:n],
            torch.zeros(2, ROUNDS, n_pages, N_KV, PAGE, D, device="cuda", dtype=torch.bfloat16),
        )

    def run(self, between: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """All results, in order."""
        n, x, results = len(self.x), self.x, []
        for i in range(ROUNDS):
            normed = rms_norm(x, self.weights[i], 1e-5)
            between()
            norms = (self.head_weight, None, 1e-5)
            q = rotate_and_store(normed, *norms, self.positions, self.cos_sin, *self.pages[:, i], self.cache_locs)
            between()
            gated = silu_mul(windows(q, n, WIDTH))
            between()
            x = windows(gated, n, WIDTH)
            results += [normed, q, gated]
        return results


@pytest.mark.parametrize("n", [16, 64, 600])
def test_a_chain_equals_one_kernel_at_a_time(n: int) -> None:
    chain = Chain.make(n)
    wanted = chain.run(torch.cuda.synchronize)
    pages = chain.pages.clone()
    for _ in range(5):
        chain.pages.zero_()
        got = chain.run()
        assert torch.equal(got[-1], wanted[-1]) and torch.equal(chain.pages, pages)


@pytest.mark.parametrize("n", [16, 64, 600])
def test_a_chain_in_a_graph_with_poisoned_buffers(n: int) -> None:
    """What a kernel reads too early is NaN; positions change between replays."""
    chain, later = Chain.make(n), Chain.make(n)
    later.positions = (later.positions + 500) % 1000
    wanted = [one.run(torch.cuda.synchronize) for one in (chain, later)]
    right = [one.pages.clone() for one in (chain, later)]
    positions = [one.positions.clone() for one in (chain, later)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain.run()
    for i in range(20):
        for buffer in (*got, chain.pages):
            buffer.fill_(float("nan"))
        chain.positions.copy_(positions[i % 2])
        graph.replay()
        for one, other in zip(got, wanted[i % 2], strict=True):
            assert torch.equal(one, other)
        written = ~chain.pages.isnan()
        assert int(written.sum()) == 2 * ROUNDS * n * N_KV * D
        assert torch.equal(chain.pages[written], right[i % 2][written])


def test_a_chain_in_a_graph_that_uses_memory_again() -> None:
    """Results that nobody holds give their memory to later ones: a kernel must not write what an earlier one reads."""
    chain = Chain.make(64)
    wanted = chain.run(torch.cuda.synchronize)[-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = chain.x
        for i in range(ROUNDS):
            x = rms_norm(x, chain.weights[i], 1e-5)
            x = rotate_and_store(
                x, chain.head_weight, None, 1e-5, chain.positions, chain.cos_sin, *chain.pages[:, i], chain.cache_locs
            )
            x = silu_mul(windows(x, 64, WIDTH))
            last, x = x, windows(x, 64, WIDTH)
    for _ in range(20):
        last.fill_(float("nan"))
        graph.replay()
        assert torch.equal(last, wanted)
