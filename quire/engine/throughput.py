"""The line that says every ten seconds what the engine did. Owns the intervals and the wording, not the figures."""

from __future__ import annotations

import logging

from quire.core.events import EngineStats

logger = logging.getLogger("quire.engine")

LOG_PERIOD_S = 10.0


class ThroughputLog:
    """Logs at INFO once in `LOG_PERIOD_S`, if there was work meanwhile."""

    def __init__(self, now_s: float) -> None:
        self._start_s = now_s
        self._before = EngineStats()
        self._busy = False

    def note(self, stats: EngineStats, now_s: float) -> None:
        """Take in a snapshot; several a second are expected. now_s: a monotonic clock."""
        self._busy |= stats.n_running > 0 or stats.n_waiting > 0 or stats.steps > self._before.steps
        elapsed_s = now_s - self._start_s
        if elapsed_s < LOG_PERIOD_S:
            return
        if self._busy:
            logger.info("%s", self._line(stats, elapsed_s))
        self._start_s, self._before, self._busy = now_s, stats, False

    def _line(self, stats: EngineStats, elapsed_s: float) -> str:
        before = self._before
        used = 1.0 - stats.n_pages_free / stats.n_pages if stats.n_pages else 0.0
        hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        return (
            f"Avg prompt throughput: {(stats.prompt_tokens - before.prompt_tokens) / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {(stats.generation_tokens - before.generation_tokens) / elapsed_s:.1f} "
            f"tokens/s, Running: {stats.n_running} reqs, Waiting: {stats.n_waiting} reqs, "
            f"KV cache usage: {used:.1%}, Prefix cache hit rate: {hits:.1%}"
        )
