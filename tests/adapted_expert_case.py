"""Random adapters of experts in one stack, and the merged matrices of one of them."""

from __future__ import annotations

import torch

from quire.kernels import lora, moe
from quire.kernels.lora.weight import blocks_of


def stack(n_places: int, n_experts: int, sizes: tuple[int, ...], k: int, most: int, dtype: torch.dtype) -> lora.Stack:
    """The ranks of the parts differ, from place to place and expert to expert; some are 0."""
    n = n_places * n_experts
    a = (torch.randn(n, len(sizes) * most, k) * k**-0.5).to(dtype)
    b = (torch.randn(n, sum(sizes), most) * most**-0.5).to(dtype)
    ranks = torch.randint(0, most + 1, (n, len(sizes)), dtype=torch.int32)
    return lora.Stack(a, b, ranks, torch.tensor(blocks_of(sizes), dtype=torch.int32), sizes)


def made(n: int, n_places: int, n_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> moe.ExpertAdapters:
    """Every third row, and the first, has none."""
    places = torch.arange(n, dtype=torch.int32) % n_places
    places[::3] = -1
    up = stack(n_places, n_experts, (inner, inner), hidden, 5, dtype)
    return moe.ExpertAdapters(up, stack(n_places, n_experts, (hidden,), inner, 5, dtype), places)


def merged(matrices: torch.Tensor, own: lora.Stack, place: int) -> torch.Tensor:
    """[E, n, k]: those of an adapter, in float64."""
    found = matrices.double().clone()
    for expert in range(len(found)):
        number, start = place * len(found) + expert, 0
        for part, size in enumerate(own.sizes):
            rank = int(own.ranks[number, part])
            a = own.a[number, part * own.most :][:rank].double()
            found[expert, start : start + size] += own.b[number, start : start + size, :rank].double() @ a
            start += size
    return found
