"""Which slot computes a row for an expert that has several: the map from experts to slots, on the device.

Owns the map. Does not own which expert is where (`planner/expert_placement`), nor the matrices (`expert_banks`).
Invariants: its tensors keep their addresses, for captured steps; rows divide the copies of an expert in turn, by their
number alone, so that ranks that have the same rows agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ExpertCopies:
    """Of one layer."""

    def __init__(self, n_experts: int, n_slots: int, n_ranks: int, first_row: int, device: torch.device) -> None:
        """n_slots: of all ranks, experts in turn in them; n_ranks: so many copies an expert has at most. first_row: as
        which this rank counts row 0, so that short steps of several ranks do not all ask the same copies."""
        self.slots = [slot % n_experts for slot in range(n_slots)]
        """The expert in each."""
        self.n_ranks, self._first_row = n_ranks, first_row
        self._slots_of = torch.zeros(n_experts, n_ranks, dtype=torch.int32, device=device)
        self._n_copies = torch.ones(n_experts, dtype=torch.int64, device=device)
        if device.type != "meta":
            self.put(self.slots)

    def put(self, slots: Sequence[int]) -> None:
        """Experts are in other slots from now on."""
        n_experts, most = self._slots_of.shape
        table: list[list[int]] = [[] for _ in range(n_experts)]
        for slot, expert in enumerate(slots):
            table[expert].append(slot)
        self._n_copies.copy_(torch.tensor([len(one) for one in table]))
        self._slots_of.copy_(torch.tensor([one + [0] * (most - len(one)) for one in table], dtype=torch.int32))
        self.slots = list(slots)

    def of(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """expert_ids: [n, k] int32 → the slots that compute them [n, k] int32."""
        n, most = len(expert_ids), self._slots_of.shape[1]
        experts = expert_ids.long()
        rows = torch.arange(self._first_row, self._first_row + n, device=experts.device)[:, None]
        return self._slots_of.view(-1)[experts * most + rows % self._n_copies[experts]]
