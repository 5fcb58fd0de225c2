"""Experts of packed matrices in one call, against the reference and against each expert's linear layers."""

from __future__ import annotations

import pytest
import torch
from coded_experts import error

from quire.kernels import catalog, moe, qgemm
from quire.kernels.moe import cpu, reference

pytestmark = pytest.mark.skipif(catalog.native_obstacle() is not None, reason=str(catalog.native_obstacle()))
FORMS = [*qgemm.SCHEMES, "float"]


def made(form: str, n_experts: int, hidden: int, inner: int, dtype: torch.dtype, biased: bool) -> moe.PackedExperts:
    def product(n: int, k: int) -> list[qgemm.PackedWeight]:
        all_of = [torch.randn(n, k).to(dtype) * k**-0.5 for _ in range(n_experts)]
        return [qgemm.pack_floats(one) if form == "float" else qgemm.pack(one, form) for one in all_of]

    def biases(n: int) -> list[torch.Tensor] | None:
        return [torch.randn(n).to(dtype) for _ in range(n_experts)] if biased else None

    return moe.PackedExperts(product(2 * inner, hidden), product(hidden, inner), biases(2 * inner), biases(hidden))


def chosen(n: int, k: int, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some ids are -1, with weights that must not be read."""
    ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
    ids[torch.rand(n, k) < 0.1] = -1
    return ids, torch.rand(n, k).masked_fill(ids < 0, torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_matches_the_reference(native_level: str, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n, k, n_experts, hidden, inner, biased in (
        (1, 3, 8, 128, 64, False),
        (9, 2, 5, 160, 96, True),
        (130, 2, 3, 64, 128, False),
    ):
        matrices = made(form, n_experts, hidden, inner, dtype, biased)
        x = torch.randn(n, hidden + 8).to(dtype)[:, :hidden]
        ids, weights = chosen(n, k, n_experts)
        wanted = reference.packed_experts(x, ids, weights, matrices)
        got = moe.packed_experts(x, ids, weights, matrices)
        assert error(got, wanted.float()) <= 2 * reference.TOLERANCE[dtype]
        residual = torch.randn(n, hidden).to(dtype)
        before = residual.clone()
        assert moe.packed_experts(x, ids, weights, matrices, residual=residual) is residual
        assert error(residual, wanted.float(), before) <= 2 * reference.TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_bits_of_its_linear_layers_whatever_the_others(native_level: str, form: str) -> None:
    torch.manual_seed(1)
    matrices = made(form, 4, 128, 64, torch.bfloat16, False)
    x, (ids, weights) = torch.randn(200, 128).bfloat16(), chosen(200, 2, 4)
    got = moe.packed_experts(x, ids, weights, matrices)
    for t in (0, 7, 199):
        assert torch.equal(cpu.packed_experts(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], matrices)[0], got[t])
        total = torch.zeros(128)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            if expert >= 0:
                inner = qgemm.linear(x[t : t + 1], matrices.up[expert], silu_mul=True)
                total = torch.addcmul(total, weight, qgemm.linear(inner, matrices.down[expert])[0].float())
        assert torch.allclose(total.bfloat16().float(), got[t].float(), atol=1e-2, rtol=1e-2)


def test_what_does_not_fit_is_refused() -> None:
    matrices = made("int8", 2, 64, 64, torch.float32, False)
    ids, weights = chosen(3, 1, 2)
    for arguments in (
        (torch.zeros(3, 65), ids, weights),
        (torch.zeros(2, 64), ids, weights),
        (torch.zeros(3, 64), ids.long(), weights),
    ):
        with pytest.raises(ValueError, match=r"must|fit"):
            moe.packed_experts(*arguments, matrices)
    with pytest.raises(ValueError, match="one expert"):
        moe.PackedExperts(matrices.down, matrices.down)
    with pytest.raises(ValueError, match="several kinds"):
        moe.PackedExperts([*matrices.up, matrices.down[0]], [*matrices.down, matrices.down[0]])
