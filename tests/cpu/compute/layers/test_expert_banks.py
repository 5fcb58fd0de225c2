"""What is stored of one expert, where those of all lie in one tensor: all of it, and nothing of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.compute.layers.expert_banks import CodedStack, Stack
from quire.compute.layers.linear import Linear
from quire.compute.schemes.fp4 import Fp4
from quire.compute.schemes.packed import Rounded
from quire.compute.schemes.plain import Plain
from quire.compute.schemes.scheme import FilledScheme
from quire.compute.schemes.w4a16 import RoundedInt4
from quire.compute.schemes.w8a8 import RoundedEightBits
from quire.config.parameters import Matrix
from quire.core.errors import LoadError


@pytest.mark.parametrize(("scheme", "n_tensors"), [(Fp4(nv=False), 3), (Fp4(nv=True), 4), (Plain(torch.float32), 2)])
def test_a_slot_is_all_of_one_expert(scheme: FilledScheme | Plain, n_tensors: int) -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape)

    matrices = [Matrix(n_in=64, parts=((f"up.{expert}", 16),), bias=True) for expert in range(3)]
    bank = Stack(make, matrices, scheme) if isinstance(scheme, Plain) else CodedStack(make, matrices, scheme)
    for one in bank.of_slot(1):
        assert one.is_contiguous()
        one.view(-1).view(torch.uint8).fill_(7)
    for whole in bank.tensors():
        filled = [bool((expert.contiguous().view(-1).view(torch.uint8) == 7).all()) for expert in whole]
        assert filled == [False, True, False] and not whole[::2].any()
    assert len(bank.of_slot(0)) == len(list(bank.tensors())) == n_tensors


@pytest.mark.parametrize("scheme", [
    RoundedInt4(torch.bfloat16, 128), RoundedEightBits(torch.int8), RoundedEightBits(torch.float8_e4m3fn),
    Rounded("int8"), Rounded("int4"),
], ids=lambda scheme: type(scheme).__name__ + scheme.name)  # fmt: skip
def test_what_cannot_be_rounded_is_named(scheme: Any) -> None:
    """The expert and its projection, which the shape of a matrix does not say."""

    def make(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    matrices = [Matrix(n_in=128, parts=((f"{at}.gate", 16), (f"{at}.up", 16))) for at in ("experts.0", "experts.1")]
    linears = (
        CodedStack(make, matrices, scheme).linears
        if scheme.makes_banks
        else ([Linear(make, matrix, scheme) for matrix in matrices])
    )
    for linear in linears:
        assert linear.weight is not None
    linears[1].weight[20, 3] = torch.nan
    linears[0].finish()
    with pytest.raises(
        LoadError, match=rf"^experts\.1\.up\.weight cannot be kept as {scheme.name}: .*infinity or a NaN"
    ):
        linears[1].finish()
