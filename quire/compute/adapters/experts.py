"""Adapters of experts: beside both products of each expert, for the rows that chose it.

Owns what of a step goes which way, and on a GPU the places. Does not own products (`kernels/moe`, `layers/experts`).
Invariants: on a CPU rows whose adapter has nothing for the experts of a layer go the way of the model, bit for bit; on
a GPU all rows of a step with adapters go the other way, which knows no company either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import torch

from quire.compute.adapters.active import Active
from quire.compute.adapters.files import Adapter
from quire.compute.device.device import Device
from quire.compute.layers.expert_banks import Bank
from quire.compute.layers.experts import Experts
from quire.config.parameters import Matrix
from quire.core.errors import ConfigError
from quire.kernels import lora, moe
from quire.kernels.lora.weight import blocks_of

Tensors = tuple[torch.Tensor, ...]
OPTION: Final = "lora_experts"
MOST_GROUPS: Final = 4096
"""Of rows with one adapter and one expert, on a GPU: a program has a number for each."""


class LinesExpertAdapters:
    """`Experts.adapted` on a CPU: rows with adapters of these experts go through one expert after another."""

    def __init__(self, layer: Experts, active: Active) -> None:
        if layer.up.matrices is not None or layer.down.matrices is not None:
            raise ConfigError(
                "lora_experts = True: experts in one tensor are not adapted on a CPU, only those that its native"
                " kernels have packed: leave --lora-experts out",
                param=OPTION,
            )
        self._layer, self._active = layer, active
        layer.adapted = self

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `Adapted`."""
        rows = self._active.rows
        if rows is None:
            return None
        assert not isinstance(rows, lora.Tiles)
        is_own = np.isin(rows, [place for place in np.unique(rows).tolist() if place >= 0 and self._has(place)])
        if not is_own.any():
            return self._without(x, expert_ids, weights, residual)
        y = torch.empty_like(x) if residual is None else residual
        for is_here, places in ((is_own, rows[is_own]), (~is_own, None)):
            at = torch.from_numpy(np.flatnonzero(is_here))
            if len(at):
                given = x[at], expert_ids[at], weights[at], None if residual is None else residual[at]
                y[at] = self._without(*given) if places is None else self._adapted(*given, places)
        return y

    def build(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """See `Adapted`: the native kernels are there."""

    def places(self, n_rows: int) -> torch.Tensor:
        """See `Adapted`."""
        rows = self._active.rows
        assert not isinstance(rows, lora.Tiles)
        return torch.full((n_rows,), -1, dtype=torch.int32) if rows is None else torch.from_numpy(rows.astype(np.int32))

    def received(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """See `Adapted`."""
        with self._active.step(places.numpy(), len(x)):
            y = self(x, expert_ids, weights, None)
        assert y is not None
        return y

    def _has(self, place: int) -> bool:
        """Whether the adapter there has something for these experts."""
        return any(one.places is not None and one.places[place] is not None for one in self._layer.of_experts)

    def _without(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        with self._active.step(None, len(x)):
            return self._layer.plain_products(x, expert_ids, weights, residual)

    def _adapted(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None,
        places: np.ndarray,
    ) -> torch.Tensor:  # fmt: skip
        def around(rows: torch.Tensor) -> AbstractContextManager[None]:
            return self._active.step(places[rows.numpy()], len(rows))

        return self._layer.in_turn(x, expert_ids, weights, residual, around)


@dataclasses.dataclass(slots=True)
class _Bank:
    """Places of one matrix of each expert: number `place * n_experts + expert`."""

    matrices: list[Matrix]
    stack: lora.Stack

    @property
    def n_bytes(self) -> int:
        return self.stack.a.nbytes + self.stack.b.nbytes + self.stack.ranks.nbytes


class StackedExpertAdapters:
    """`Experts.adapted` on a GPU: one call for all experts and adapters, which can be captured."""

    def __init__(
        self, layer: Experts, active: Active, n_places: int, max_rank: int, dtype: torch.dtype, device: Device
    ) -> None:
        if layer.up.matrices is None or layer.down.matrices is None:
            raise ConfigError(
                "lora_experts = True: these experts are multiplied by one after another, as their weight scheme is"
                f" {layer.of_experts[0].scheme.name}, and cannot be adapted on a GPU: leave --lora-experts out",
                param=OPTION,
            )
        n_groups, n_experts = n_places * len(layer.up.linears), len(layer.up.linears)
        if n_groups > MOST_GROUPS:
            raise ConfigError(
                f"lora_experts = True and max_loras = {n_places}: with {n_experts} experts these are {n_groups} groups"
                f" of rows, of which {MOST_GROUPS} can be sorted: lower --max-loras to {MOST_GROUPS // n_experts}",
                param="max_loras",
            )
        self._layer, self._active, self._device = layer, active, device
        self._n_places, self._most, self._dtype = n_places, max_rank, dtype
        layer.adapted = self
        self.lay()

    def lay(self) -> None:
        """Places without adapters."""
        self._banks = [self._bank(bank, self._n_places) for bank in (self._layer.up, self._layer.down)]
        self.n_bytes = sum(bank.n_bytes for bank in self._banks)

    def leave_device(self) -> None:
        """Give their memory back."""
        self._banks = [self._bank(bank, 0) for bank in (self._layer.up, self._layer.down)]

    def _bank(self, bank: Bank, n_places: int) -> _Bank:
        matrices = [linear.matrix for linear in bank.linears]
        first, n = matrices[0], n_places * len(matrices)
        sizes, most = tuple(rows for _, rows in first.parts), self._most
        return _Bank(matrices, lora.Stack(
            self._device.zeros((n, len(sizes) * most, first.n_in), self._dtype),
            self._device.zeros((n, first.n_out, most), self._dtype),
            self._device.zeros((n, len(sizes)), torch.int32),
            self._device.upload(np.array(blocks_of(sizes), np.int32)), sizes,
        ))  # fmt: skip

    def keep(self, adapter: Adapter) -> list[Tensors | None]:
        """Of both products what is kept on the host, None: nothing."""
        return [self._kept(bank, adapter) for bank in self._banks]

    def _kept(self, bank: _Bank, adapter: Adapter) -> Tensors | None:
        if not any(name in adapter.pairs for one in bank.matrices for name, _ in one.parts):
            return None
        n, most, stack = len(bank.matrices), self._most, bank.stack
        a = torch.zeros(n, *stack.a.shape[1:], dtype=self._dtype)
        b = torch.zeros(n, *stack.b.shape[1:], dtype=self._dtype)
        ranks = torch.zeros(n, len(stack.sizes), dtype=torch.int32)
        for expert, matrix in enumerate(bank.matrices):
            start = 0
            for part, (name, size) in enumerate(matrix.parts):
                if (pair := adapter.pairs.get(name)) is not None:
                    rank = len(pair.a)
                    a[expert, part * most : part * most + rank] = pair.a
                    b[expert, start : start + size, :rank] = pair.b
                    ranks[expert, part] = rank
                start += size
        return tuple(one.pin_memory() if stack.a.is_cuda else one for one in (a, b, ranks))

    def put(self, place: int, kept: Sequence[Tensors | None]) -> None:
        """Into a place, for the steps that are queued from now on."""
        for bank, own in zip(self._banks, kept, strict=True):
            n = len(bank.matrices)
            here = slice(place * n, (place + 1) * n)
            if own is None:
                bank.stack.ranks[here].zero_()
                continue
            for target, source in zip((bank.stack.a, bank.stack.b, bank.stack.ranks), own, strict=True):
                target[here].copy_(source, non_blocking=True)

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | None:
        """See `Adapted`."""
        tiles = self._active.rows
        if tiles is None:
            return None
        assert isinstance(tiles, lora.Tiles) and tiles.places is not None
        return self._products(x, expert_ids, weights, residual, tiles.places)

    def places(self, n_rows: int) -> torch.Tensor:
        """See `Adapted`."""
        tiles = self._active.rows
        if tiles is None:
            return torch.full((n_rows,), -1, dtype=torch.int32, device=self._banks[0].stack.ranks.device)
        assert isinstance(tiles, lora.Tiles) and tiles.places is not None
        return tiles.places

    def received(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """See `Adapted`: with and without adapters rows go one way, as what other ranks' rows have is not known."""
        return self._products(x, expert_ids, weights, None, places)

    def build(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """See `Adapted`: of rows without adapters."""
        places = torch.full((len(x),), -1, dtype=torch.int32, device=x.device)
        self._products(x, expert_ids, weights, residual, places)

    def _products(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None,
        places: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        layer = self._layer
        assert layer.up.matrices is not None and layer.down.matrices is not None
        up, down = (bank.stack for bank in self._banks)
        return moe.adapted_experts(
            x, expert_ids, weights, layer.up.matrices, layer.down.matrices, moe.ExpertAdapters(up, down, places),
            gating=layer.spec.gating, up_bias=layer.up.bias, down_bias=layer.down.bias, residual=residual,
        )  # fmt: skip


def bank_bytes(layer: Experts, n_places: int, max_rank: int, dtype: torch.dtype) -> int:
    """What `StackedExpertAdapters` takes, but for some numbers."""
    matrices = (linear.matrix for linear in layer.of_experts)
    return n_places * max_rank * dtype.itemsize * sum(len(one.parts) * one.n_in + one.n_out for one in matrices)
