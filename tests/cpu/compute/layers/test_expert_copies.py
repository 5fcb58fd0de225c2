"""Rows go to slots that have their expert, copies get as many, and the map changes in place."""

from __future__ import annotations

import torch

from quire.compute.layers.expert_copies import ExpertCopies

SLOTS = [2, 0, 1, 3, 0, 0, 1, 2]


def test_rows_divide_the_copies_of_an_expert() -> None:
    copies = ExpertCopies(4, 8, 4, 0, torch.device("cpu"))
    before = copies.of(torch.tensor([[0, 3], [0, 3]], dtype=torch.int32))
    assert before.tolist() == [[0, 3], [4, 7]] and before.dtype == torch.int32
    copies.put(SLOTS)
    expert_ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(n)) for n in range(60)]).int()
    slots = copies.of(expert_ids)
    assert torch.equal(torch.tensor(SLOTS)[slots.long()], expert_ids.long())
    for expert in range(4):
        counts = torch.bincount(slots[expert_ids == expert], minlength=8)
        held = [slot for slot, one in enumerate(SLOTS) if one == expert]
        assert counts[held].tolist() == [60 // len(held)] * len(held)


def test_ranks_that_count_rows_from_elsewhere_ask_other_copies() -> None:
    one = torch.zeros(1, 1, dtype=torch.int32)
    first, second = (ExpertCopies(2, 4, 2, row, torch.device("cpu")) for row in (0, 1))
    assert (first.of(one).item(), second.of(one).item()) == (0, 2)


def test_tensors_keep_their_addresses() -> None:
    copies = ExpertCopies(4, 8, 4, 0, torch.device("cpu"))
    held = [tensor.data_ptr() for tensor in vars(copies).values() if isinstance(tensor, torch.Tensor)]
    copies.put(SLOTS)
    assert held == [tensor.data_ptr() for tensor in vars(copies).values() if isinstance(tensor, torch.Tensor)] != []
