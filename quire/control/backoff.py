"""How much of its limits the scheduler uses: less after the device ran out of memory, more again when steps succeed.

Owns two numbers. Does not own what is retried (`Scheduler.retry_all`). Invariant: at least one sequence and
`MIN_TOKENS` tokens (or the configured limit, if it is less) remain, so that everything still makes progress.
"""

from __future__ import annotations

MIN_TOKENS = 16
GOOD_STEPS = 256
"""Steps without a failure after which the limits in use are doubled."""


class Backoff:
    """Halved and doubled."""

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        self._max_seqs, self._max_tokens = max_seqs, max_tokens
        self._n_good = 0
        self._set(0)

    def _set(self, n_halvings: int) -> None:
        self._n_halvings = n_halvings
        self.n_seqs = max(1, self._max_seqs >> n_halvings)
        """Most sequences that run."""
        least = min(MIN_TOKENS, self._max_tokens)
        self.n_tokens = max(self._max_tokens >> n_halvings, least, self.n_seqs)
        """Most tokens in a step."""

    def halve(self) -> bool:
        """Use less from now on; False if there is no less."""
        self._n_good = 0
        before = (self.n_seqs, self.n_tokens)
        self._set(self._n_halvings + 1)
        if (self.n_seqs, self.n_tokens) == before:
            self._set(self._n_halvings - 1)
            return False
        return True

    def count_step(self) -> None:
        """A step has succeeded."""
        if self._n_halvings:
            self._n_good += 1
            if self._n_good >= GOOD_STEPS:
                self._n_good = 0
                self._set(self._n_halvings - 1)
