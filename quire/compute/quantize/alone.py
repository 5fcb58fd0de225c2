"""One decoder layer by itself: whole sequences of one length go through it, one after another.

Owns the pages and states that a layer needs for one sequence. Does not own the layer. Invariant: sequences do not see
one another; each begins at position 0.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.states import StatePool
from quire.compute.runner.tables import SlotTables
from quire.config.arch import ModelArch
from quire.config.layers import LayerSpec
from quire.kernels.state import plan_spans, spans_of

PAGE = 16


class Alone:
    """What a layer of one description asks of its context; the layer was made as number 0."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, length: int, dtype: torch.dtype, device: Device) -> None:
        one = msgspec.structs.replace(arch, layers=(spec,))
        n_pages = -(-length // PAGE)
        self._positions = torch.arange(length, device=device.torch_device)
        pool = KVPool(one, 1 + n_pages, PAGE, dtype, device)
        pool.states = StatePool(one, 1, 0, dtype, device)
        tables = SlotTables(1, length, PAGE, device)
        tables.pages[0, 0, :n_pages] = torch.arange(1, 1 + n_pages)
        bounds, slot = np.array([0, length], dtype=np.int32), np.zeros(1, dtype=np.int32)
        plans = plan_attention(pool, tables, bounds[1:], slot, bounds)
        spans = spans_of([device.upload(array) for array in plan_spans(bounds, slot, slot)])
        self._context = PagedContext(pool, plans, [self._positions + PAGE], spans=spans)  # page 0 takes padding

    def run(self, layer: DecoderLayer, states: torch.Tensor) -> torch.Tensor:
        """states: [n, length, hidden], the stream before the layer, left as it is → the stream behind it."""
        return torch.stack([layer(one.clone(), self._positions, self._context) for one in states])
