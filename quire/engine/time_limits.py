"""Limits on the time of a request that waits outside the queue: for its adapter, or for its grammar.

Owns that this time counts. Does not own the limits of queued requests (`control/deadlines`).
"""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec

from quire.core.failure import Code
from quire.core.request import Request

LEAST_S: Final = 1e-6
"""What is left of a limit that has not passed: 0 would be no limit."""


@dataclasses.dataclass(slots=True)
class TimedRequest:
    """A request that cannot be queued yet."""

    request: Request
    since_s: float

    @property
    def limit(self) -> tuple[float, Code]:
        """(seconds that it may wait, 0: any; the code of the limit)."""
        terms = self.request.terms
        limits = ((terms.queue_limit_s, Code.QUEUE_TIMEOUT), (terms.time_limit_s, Code.REQUEST_TIMEOUT))
        return min((one for one in limits if one[0] > 0), default=(0.0, Code.QUEUE_TIMEOUT))

    def is_late(self, now_s: float) -> bool:
        """Whether its limit has passed."""
        return 0 < self.limit[0] <= now_s - self.since_s

    def queued(self, now_s: float) -> Request:
        """The request, with what is left of its limits."""
        terms, waited_s = self.request.terms, now_s - self.since_s
        queue_s, time_s = (
            max(limit_s - waited_s, LEAST_S) if limit_s else 0.0
            for limit_s in (terms.queue_limit_s, terms.time_limit_s)
        )
        self.request.terms = msgspec.structs.replace(terms, queue_limit_s=queue_s, time_limit_s=time_s)
        return self.request
