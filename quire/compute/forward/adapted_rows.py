"""Which rows of a captured step have which adapter: memory that a step fills and its graph reads.

Owns that memory. Does not own the adapters (`compute/adapters`) nor the graphs (`graphs.py`).
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from quire.compute.adapters.places import Adapters
from quire.compute.device.cuda import Staging
from quire.kernels import lora
from quire.kernels.lora.weight import most_tiles, tiles_room


class AdaptedRows:
    """For steps of up to n_rows rows."""

    def __init__(self, staging: Staging, adapters: Adapters, n_rows: int) -> None:
        self._adapters = adapters
        self._places = staging.section((n_rows,), torch.int32)
        self._order = staging.section((n_rows,), torch.int32)
        self._tiles = staging.section((tiles_room(n_rows, adapters.n_places), 3), torch.int32)

    def fill(self, size: int, places: np.ndarray | None = None) -> None:
        """Of a step that is sent as one of `size` rows. places: of the rows, int [n]; None: none has one."""
        padded = np.full(size, -1, np.int32)
        if places is not None:
            padded[: len(places)] = places
        self._places.host[:size] = padded
        self._places.filled(size)
        n_tiles = most_tiles(size, self._adapters.n_places)
        self._order.host[:size], self._tiles.host[:n_tiles] = lora.tiles_of(padded, n_tiles)
        self._order.filled(size)
        self._tiles.filled(3 * n_tiles)

    def active(self, size: int) -> contextlib.AbstractContextManager[None]:
        """What is launched inside reads it."""
        tiles = self._tiles.device[: most_tiles(size, self._adapters.n_places)]
        return self._adapters.active(lora.Tiles(self._order.device[:size], tiles, self._places.device[:size]), size)
