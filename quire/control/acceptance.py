"""What became of a sequence's drafts, and what that says about its next one."""

from __future__ import annotations

import dataclasses
from typing import Final

MEMORY: Final = 0.9
"""Of the drafts before, weighed against one more."""


@dataclasses.dataclass(slots=True)
class Acceptance:
    """What became of a sequence's drafts."""

    n_right: float
    n_verified: float
    """Both fade: the last ten drafts or so count. A draft behind a wrong one says nothing and is not counted."""
    n_vain: int = 0
    """Times in a row that it was asked and no draft was kept, or none was found."""
    declined: float | None = None
    """Its rate when drafts were last found not to pay for it; None: they never were."""

    @property
    def rate(self) -> float:
        """The chance that its next draft is right."""
        return self.n_right / self.n_verified

    def count(self, n_verified: int, n_right: int) -> None:
        """Of the drafts of a step the first `n_right` were right."""
        n_trials = min(n_verified, n_right + 1)
        faded = MEMORY**n_trials
        self.n_right = faded * self.n_right + n_right
        self.n_verified = faded * self.n_verified + n_trials
        self.n_vain = 0 if n_right else self.n_vain + 1
