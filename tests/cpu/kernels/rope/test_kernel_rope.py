"""Rotary embedding: against float64 and against transformers, on slices of a fused projection."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quire.kernels import rope
from quire.kernels.rope import reference


def table(max_pos: int, rotary_dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_pos).double(), 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 16, 16), (7, 4, 2, 64, 64), (600, 6, 3, 80, 20), (5, 8, 1, 33, 6)], ids=str
)
def test_matches_float64(level: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]) -> None:
    n, hq, hk, d, rotary_dim = shape
    fused = torch.randn(n, (hq + hk) * d + 11, dtype=torch.float64).to(dtype)
    q, k = (
        fused[:, 3 : 3 + hq * d].unflatten(1, (hq, d)),
        fused[:, 3 + hq * d : 3 + (hq + hk) * d].unflatten(1, (hk, d)),
    )
    positions, cos_sin, before = torch.randint(0, 900, (n,)), table(900, rotary_dim), fused.clone()
    expected = reference.apply_rope(q.double(), k.double(), positions, cos_sin.double())
    for got, right in zip(rope.apply_rope(q, k, positions, cos_sin), expected, strict=True):
        assert got.dtype == dtype
        assert float(((got.double() - right).abs() / (1 + right.abs())).max()) <= reference.TOLERANCE[dtype]
    assert torch.equal(fused[:, :3], before[:, :3])
    assert torch.equal(fused[:, -8:], before[:, -8:])


def test_matches_transformers_for_both_kinds_of_positions(level: str) -> None:
    q, k, cos_sin = torch.randn(11, 4, 32), torch.randn(11, 2, 32), table(50, 32)
    positions = torch.randint(0, 50, (11,))
    cos, sin = (torch.cat((half, half), 1)[positions][None] for half in cos_sin.chunk(2, dim=1))
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for kind in (torch.int64, torch.int32):
        ours = rope.apply_rope(q.clone(), k.clone(), positions.to(kind), cos_sin)
        for got, right in zip(ours, theirs, strict=True):
            assert torch.allclose(got, right[0].transpose(0, 1), atol=1e-6)


def test_mismatches_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        rope.apply_rope(torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(3), table(4, 8))
