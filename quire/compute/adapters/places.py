"""Adapters where steps find them: a place for each, and in each a pair of matrices for each of the model's.

Owns their memory on the device, what is kept of them on the host, and which rows of the running step have which.
Does not own which adapter is in which place (`control/adapters`) nor files (`files`).
Invariants: a model's products are what they were for rows without an adapter, bit for bit; where tensors are stacked,
their addresses stay, so that steps can be captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from quire.compute.adapters.active import Active, Rows
from quire.compute.adapters.experts import LinesExpertAdapters, StackedExpertAdapters, bank_bytes
from quire.compute.adapters.files import Adapter
from quire.compute.adapters.pairs import Pair
from quire.compute.device.device import Device
from quire.compute.layers.experts import Experts
from quire.compute.layers.linear import Linear
from quire.compute.schemes.plain import PlainProduct
from quire.compute.schemes.scheme import Product
from quire.config.parameters import Matrix
from quire.core.errors import EngineError
from quire.kernels import lora
from quire.kernels.act import silu_mul as silu_mul_op
from quire.kernels.gemm import Norm
from quire.kernels.lora.weight import blocks_of, most_tiles


class AdaptedProduct:
    """A product of the model, and what the adapters of the running step add to it."""

    def __init__(self, product: Product, active: Active) -> None:
        self._product, self._active = product, active

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Product`."""
        return self._product.tensors

    def _add(self, x: torch.Tensor, rows: Rows, y: torch.Tensor, norm: Norm | None) -> None:
        raise NotImplementedError

    def _together(
        self, x: torch.Tensor, rows: Rows, bias: torch.Tensor | None, norm: Norm | None,
        residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The product and what is added, where one kernel does both."""
        return None

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        silu_mul: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product`."""
        rows = self._active.rows
        if rows is None:
            return self._product(x, bias, norm=norm, residual=residual, silu_mul=silu_mul, out=out)
        if len(x) != self._active.n_rows:
            raise EngineError(f"a product of {len(x)} rows in a step with adapters of {self._active.n_rows}")
        whole = self._together(x, rows, bias, norm, residual, silu_mul, out)
        if whole is not None:
            return whole
        y = self._product(x, bias, norm=norm, residual=residual, out=out)
        if silu_mul:
            return self._add_and_activate(x, rows, y, norm)
        self._add(x, rows, y, norm)
        return y

    def _add_and_activate(self, x: torch.Tensor, rows: Rows, y: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        self._add(x, rows, y, norm)
        return silu_mul_op(y)


class _LinesProduct(AdaptedProduct):
    def __init__(self, product: Product, active: Active, places: lora.Places) -> None:
        super().__init__(product, active)
        self._places = places

    def _add(self, x: torch.Tensor, rows: Rows, y: torch.Tensor, norm: Norm | None) -> None:
        assert not isinstance(rows, lora.Tiles)
        lora.add_lines(x, self._places, rows, y, norm)


class _StackedProduct(AdaptedProduct):
    def __init__(self, product: Product, active: Active, stack: lora.Stack) -> None:
        super().__init__(product, active)
        self.stack = stack

    def _together(
        self, x: torch.Tensor, rows: Rows, bias: torch.Tensor | None, norm: Norm | None,
        residual: torch.Tensor | None, silu_mul: bool, out: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        if not isinstance(self._product, PlainProduct):
            return None
        assert isinstance(rows, lora.Tiles)
        given = (x, self._product.weight, self.stack, rows, bias, norm, residual, silu_mul, out)
        launch = lora.prepare_linear(*given)
        return None if isinstance(launch, str) else launch(*given)

    def _add(self, x: torch.Tensor, rows: Rows, y: torch.Tensor, norm: Norm | None) -> None:
        assert isinstance(rows, lora.Tiles)
        lora.add(x, self.stack, rows, y, norm)

    def _add_and_activate(self, x: torch.Tensor, rows: Rows, y: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        sizes = self.stack.sizes
        if len(sizes) != 2 or sizes[0] != sizes[1]:
            return super()._add_and_activate(x, rows, y, norm)
        assert isinstance(rows, lora.Tiles)
        activated = y.new_empty(len(y), sizes[0])
        lora.add(x, self.stack, rows, y, norm, activated)
        return activated


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """An adapter on the host, as its place takes it: of each product; or all in one tensor, and ranks behind it."""

    lines: Sequence[lora.Lines | None] = ()
    numbers: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    experts: Sequence[Any] = ()
    """Of each layer with experts beside that, see `experts.StackedExpertAdapters`."""


class Adapters:
    """Of one model; `n_places` of them at once. It puts itself around the model's products."""

    n_bytes = 0
    """Memory that it has taken on the device."""
    rank = 0
    """For which products are compiled that add them; 0: there is none."""

    def __init__(self, n_places: int) -> None:
        self.n_places = n_places
        self._active = Active()

    def keep(self, adapter: Adapter) -> Kept:
        """What is to be kept on the host of an adapter."""
        raise NotImplementedError

    def put(self, place: int, kept: Kept) -> None:
        """Into a place, for the steps that are queued from now on."""
        raise NotImplementedError

    def rows(self, places: np.ndarray) -> Rows:
        """places: of each row of a step, int [n], -1: none."""
        raise NotImplementedError

    def leave_device(self) -> None:
        """Give back the memory of the places; what was in them is void."""

    def enter_device(self) -> None:
        """Take it again: places without adapters."""

    def active(self, rows: Rows | None, n_rows: int) -> contextlib.AbstractContextManager[None]:
        """Steps inside have these rows; None: no adapters."""
        return self._active.step(rows, n_rows)


class LinesAdapters(Adapters):
    """On a CPU: each by itself."""

    def __init__(
        self, linears: Sequence[Linear], n_places: int, dtype: torch.dtype, experts: Sequence[Experts] = ()
    ) -> None:
        super().__init__(n_places)
        self._dtype = dtype
        of_experts = [linear for layer in experts for linear in layer.of_experts]
        self._linears = [*linears, *of_experts]
        for linear in self._linears:
            matrix = linear.matrix
            linear.places = places = lora.Places(n_places, matrix.n_out, matrix.n_in)
            linear.run = _LinesProduct(linear.product, self._active, places)
        for layer in experts:
            LinesExpertAdapters(layer, self._active)

    def keep(self, adapter: Adapter) -> Kept:
        """See `Adapters`."""
        return Kept([self._lines(linear.matrix, adapter) for linear in self._linears])

    def _lines(self, matrix: Matrix, adapter: Adapter) -> lora.Lines | None:
        parts, start = [], 0
        for name, size in matrix.parts:
            pair = adapter.pairs.get(name)
            if pair is not None:
                parts.append((start, pair.a, pair.b))
            start += size
        return lora.Lines.of(parts, self._dtype) if parts else None

    def put(self, place: int, kept: Kept) -> None:
        """See `Adapters`."""
        for linear, one in zip(self._linears, kept.lines, strict=True):
            assert linear.places is not None
            linear.places.put(place, one)

    def rows(self, places: np.ndarray) -> Rows:
        """See `Adapters`."""
        return places


class StackedAdapters(Adapters):
    """On a GPU: one tensor [places, numbers of an adapter of the largest rank], so that it is loaded by one copy."""

    def __init__(
        self, linears: Sequence[Linear], n_places: int, max_rank: int, dtype: torch.dtype, device: Device,
        experts: Sequence[Experts] = (),
    ) -> None:  # fmt: skip
        super().__init__(n_places)
        self._experts = [StackedExpertAdapters(one, self._active, n_places, max_rank, dtype, device) for one in experts]
        self._matrices, self._most, self._device = [linear.matrix for linear in linears], max_rank, device
        self.rank = max_rank if max_rank in lora.FUSED_RANKS else 0
        sizes = [_n_numbers(one, max_rank) for one in self._matrices]
        counts = [len(one.parts) for one in self._matrices]
        self._starts, self._rank_starts = ([0, *itertools.accumulate(each)] for each in (sizes, counts))
        self._dtype = dtype
        self._lay()
        self.n_bytes = self._numbers.nbytes + self._ranks.nbytes + sum(one.n_bytes for one in self._experts)
        self._products = [
            _StackedProduct(linear.product, self._active, self._stack(index)) for index, linear in enumerate(linears)
        ]
        for linear, product in zip(linears, self._products, strict=True):
            linear.run = product

    def _lay(self) -> None:
        """Places without adapters."""
        self._numbers = self._device.zeros((self.n_places, self._starts[-1]), self._dtype)
        self._ranks = self._device.zeros((self.n_places, self._rank_starts[-1]), torch.int32)

    def _stack(self, index: int) -> lora.Stack:
        matrix = self._matrices[index]
        a, b = self._views(index, self._numbers)
        sizes = tuple(rows for _, rows in matrix.parts)
        ranks = self._ranks[:, self._rank_starts[index] : self._rank_starts[index + 1]]
        return lora.Stack(a, b, ranks, self._device.upload(np.array(blocks_of(sizes), np.int32)), sizes)

    def _views(self, index: int, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of a matrix in [n, numbers of an adapter]."""
        matrix = self._matrices[index]
        own = numbers[:, self._starts[index] : self._starts[index + 1]]
        n_a = len(matrix.parts) * self._most * matrix.n_in
        a = own[:, :n_a].unflatten(1, (len(matrix.parts) * self._most, matrix.n_in))  # type: ignore[no-untyped-call]
        return a, own[:, n_a:].unflatten(1, (matrix.n_out, self._most))  # type: ignore[no-untyped-call]

    def keep(self, adapter: Adapter) -> Kept:
        """See `Adapters`."""
        numbers = torch.zeros(1, self._starts[-1], dtype=self._numbers.dtype)
        ranks = torch.zeros(self._rank_starts[-1], dtype=torch.int32)
        for index, matrix in enumerate(self._matrices):
            a, b = self._views(index, numbers)
            column = 0
            for part, (name, size) in enumerate(matrix.parts):
                pair = adapter.pairs.get(name)
                if pair is not None:
                    self._write(a[0, part * self._most :], b[0, column : column + size], pair)
                    ranks[self._rank_starts[index] + part] = len(pair.a)
                column += size
        if self._numbers.is_cuda:
            numbers = numbers.pin_memory()
        return Kept(numbers=numbers[0], ranks=ranks, experts=[one.keep(adapter) for one in self._experts])

    def _write(self, a: torch.Tensor, b: torch.Tensor, pair: Pair) -> None:
        rank = len(pair.a)
        a[:rank], b[:, :rank] = pair.a, pair.b

    def put(self, place: int, kept: Kept) -> None:
        """See `Adapters`."""
        assert kept.numbers is not None and kept.ranks is not None
        self._numbers[place].copy_(kept.numbers, non_blocking=True)
        self._ranks[place].copy_(kept.ranks, non_blocking=True)
        for one, own in zip(self._experts, kept.experts, strict=True):
            one.put(place, own)

    def rows(self, places: np.ndarray) -> Rows:
        """See `Adapters`."""
        n = len(places)
        order, tiles = lora.tiles_of(places, most_tiles(n, self.n_places))
        sent = self._device.upload(np.concatenate([order, places.astype(np.int32), tiles.ravel()]))
        return lora.Tiles(sent[:n], sent[2 * n :].view(-1, 3), sent[n : 2 * n])

    def leave_device(self) -> None:
        """See `Adapters`."""
        self._numbers, self._ranks = self._numbers[:0].clone(), self._ranks[:0].clone()
        for one in self._experts:
            one.leave_device()
        for index, product in enumerate(self._products):
            product.stack = self._stack(index)

    def enter_device(self) -> None:
        """See `Adapters`."""
        self._lay()
        for one in self._experts:
            one.lay()
        for index, product in enumerate(self._products):
            product.stack = self._stack(index)


def _n_numbers(matrix: Matrix, rank: int) -> int:
    """Of the largest adapter of a matrix."""
    return len(matrix.parts) * rank * matrix.n_in + matrix.n_out * rank


def device_bytes(
    device: Device, linears: Iterable[Linear], n_places: int, max_rank: int, dtype: torch.dtype,
    experts: Sequence[Experts] = (),
) -> int:  # fmt: skip
    """What `adapters_on` takes for them, but for some numbers."""
    if device.is_host:
        return 0
    n_bytes = n_places * dtype.itemsize * sum(_n_numbers(linear.matrix, max_rank) for linear in linears)
    return n_bytes + sum(bank_bytes(layer, n_places, max_rank, dtype) for layer in experts)


def adapters_on(
    device: Device, linears: Sequence[Linear], n_places: int, max_rank: int, dtype: torch.dtype,
    experts: Sequence[Experts] = (),
) -> Adapters:  # fmt: skip
    """Around these products of a finished model, and those of the experts of some layers."""
    if device.is_host:
        return LinesAdapters(linears, n_places, dtype, experts)
    return StackedAdapters(linears, n_places, max_rank, dtype, device, experts)
