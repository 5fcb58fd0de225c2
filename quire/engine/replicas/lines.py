"""Which lines of Ray's processes this process shows, and how: by settings that Ray documents. Imports no Ray."""

from __future__ import annotations

import sys
from typing import Final

from quire.core import env

INTERNALS: Final = (
    r"INFO \S+ \S+ controller \d+ --"
    r"|controller \d+ -- .*(?:crashed, marking it unhealthy|failed health check, stopping it|are UNHEALTHY)"
    r"|A worker died or was killed while executing a task"
    r"|Task ServeController\.\S+ failed"
)
"""What Ray says when it places replicas, loses and ends them: the server's own log says it. Ray's files have it."""
ALL_ELSE: Final = f"^(?!.*(?:{INTERNALS}))"


def settle() -> None:
    """Leave out `INTERNALS`; show all else at once, each replica's lines too that are like another's, in colours on a
    terminal alone. Before Ray is imported; what the user has set himself stays."""
    env.set_for_children("RAY_DEDUP_LOGS_SKIP_REGEX", INTERNALS)
    env.set_for_children("RAY_DEDUP_LOGS_ALLOW_REGEX", ALL_ELSE)
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        env.set_for_children("RAY_COLOR_PREFIX", "0")
