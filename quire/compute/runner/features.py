"""Features: what a drafting head reads of every token, a state of the model, or some joined by a linear layer.

Owns their pages, which have the numbers of the pages of keys and values, so that a feature stays as long as the keys of
its token and is shared and copied with them. Does not own the linear layer, a part of the head (`compute/draft/head`).
Invariant: each step of the model leaves the features of its rows, whichever way its states are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.compute.device.device import Device
from quire.compute.layers.linear import Linear
from quire.core.plan import PageCopy
from quire.kernels.fused_step import FusedStep
from quire.kernels.kvstore import op as kvstore
from quire.kernels.qgemm.cpu import ADD, NOTHING

Visit = Callable[[int, torch.Tensor], None]
"""`visit(layer, x)`: told the residual stream [n, hidden] that a layer is about to read, or that the last one left."""


class Features:
    """`first` and `second`: [n_pages, 1, page_size, hidden / 2], the halves of each token's feature."""

    def __init__(
        self,
        taps: Sequence[int],
        parts: Sequence[Linear],
        hidden_size: int,
        n_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        """taps: numbers of layers, rising, that of a layer behind the last for what this leaves. parts: of each its
        columns of the linear layer that joins them; none for one tap, whose state is the feature."""
        self._taps, self._parts, self.hidden_size = tuple(taps), tuple(parts), hidden_size
        shape = (n_pages, 1, page_size, hidden_size // 2)
        self.first, self.second = device.zeros(shape, dtype), device.zeros(shape, dtype)

    def copy(self, copies: list[PageCopy]) -> None:
        """Copy on write, as `KVPool.copy`."""
        sources, targets, counts = ([getattr(one, name) for one in copies] for name in ("source", "target", "n_tokens"))
        kvstore.copy_pages(self.first, self.second, sources, targets, counts)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Of single tokens, as `KVPool.move`, of the first group."""
        half = self.hidden_size // 2
        for pages in (self.first, self.second):
            lines = pages.view(-1, half)
            lines[targets] = lines[sources]

    def read(self, cache_locs: torch.Tensor, out: torch.Tensor) -> None:
        """cache_locs: int64 [n], page * page_size + offset of tokens → their features, in out [n, hidden]."""
        half = self.hidden_size // 2
        out[:, :half] = self.first.view(-1, half)[cache_locs]
        out[:, half:] = self.second.view(-1, half)[cache_locs]

    def reads(self, layer: int) -> bool:
        """Whether the state before a layer is tapped."""
        return layer in self._taps

    def visit(self, cache_locs: torch.Tensor) -> Visit:
        """For a step whose rows lie at cache_locs, int64 [n]: joins what it is told, and stores it after the last."""
        joined: list[torch.Tensor] = []

        def visit(layer: int, x: torch.Tensor) -> None:
            if layer in self._taps:
                at = self._taps.index(layer)
                joined.append(self._parts[at](x, residual=joined[-1] if joined else None) if self._parts else x)
                if layer == self._taps[-1]:
                    self._write(cache_locs, joined[-1])

        return visit

    def _write(self, cache_locs: torch.Tensor, features: torch.Tensor) -> None:
        half = self.hidden_size // 2
        self.first.view(-1, half)[cache_locs] = features[:, :half]
        self.second.view(-1, half)[cache_locs] = features[:, half:]

    def record(self, fused: FusedStep, layer: int, x: torch.Tensor, joined: torch.Tensor) -> None:
        """What `visit` does, as operations of `fused` before those of a layer. x, joined: [max_rows, hidden], the
        residual stream and memory of this object's own."""
        if layer in self._taps:
            at = self._taps.index(layer)
            if self._parts:
                self._parts[at].record(fused, x, joined, then=ADD if at else NOTHING)
            if layer == self._taps[-1]:
                fused.store(joined if self._parts else x, self.first, self.second)
