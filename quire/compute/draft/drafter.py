"""`Drafter`: guesses how a sequence goes on. A wrong guess costs time, never a token: each is verified."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Drafter(Protocol):
    """Asked for each sequence when its step begins, where all of its tokens are known."""

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        """Up to n token ids that may follow `tokens`, int32 [length], which are the prompt's and the output's of the
        sequence in `slot`, and are not to be changed. Fewer, or none, make the step shorter."""
        ...
