"""What rows of the step that is computed now have which adapter.

Owns that alone. Does not own who adds what (`bank`, `experts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from quire.kernels import lora

Rows = lora.Tiles | lora.Groups
"""Of a step, which have which adapter, as its bank takes it."""


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
