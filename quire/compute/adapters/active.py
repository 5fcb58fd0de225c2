"""What rows of the step that is computed now have which adapter.

Owns that alone. Does not own who adds what (`places`, `experts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from quire.kernels import lora

Rows = lora.Tiles | np.ndarray
"""Of a step, which have which adapter, as its places take it; on a CPU the place of each, int [n], -1: none."""


@dataclasses.dataclass(slots=True)
class Active:
    """Beside the model's products, of the step that is computed now, or captured."""

    rows: Rows | None = None
    n_rows: int = 0

    @contextlib.contextmanager
    def step(self, rows: Rows | None, n_rows: int) -> Iterator[None]:
        """Products inside are of these rows; None: of rows without adapters."""
        before, self.rows, self.n_rows = (self.rows, self.n_rows), rows, n_rows
        try:
            yield
        finally:
            self.rows, self.n_rows = before
