"""What is stored of one expert, where those of all lie in one tensor: all of it, and nothing of the others."""

from __future__ import annotations

import pytest
import torch

from quire.compute.layers.expert_banks import CodedStack, Stack
from quire.compute.schemes.mxfp4 import Mxfp4
from quire.compute.schemes.plain import Plain
from quire.config.parameters import Matrix


@pytest.mark.parametrize("is_coded", [True, False])
def test_a_slot_is_all_of_one_expert(is_coded: bool) -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.zeros(shape)

    matrices = [Matrix(n_in=64, parts=((f"up.{expert}", 16),), bias=True) for expert in range(3)]
    bank = CodedStack(make, matrices, Mxfp4()) if is_coded else Stack(make, matrices, Plain(torch.float32))
    for one in bank.of_slot(1):
        assert one.is_contiguous()
        one.view(-1).view(torch.uint8).fill_(7)
    for whole in bank.tensors():
        filled = [bool((expert.contiguous().view(-1).view(torch.uint8) == 7).all()) for expert in whole]
        assert filled == [False, True, False] and not whole[::2].any()
    assert len(bank.of_slot(0)) == len(list(bank.tensors())) == (3 if is_coded else 2)
