"""What a server's model of time expected of the requests of a run, beside what they took: asked of the server itself.

Owns the asking (`GET /v1/requests/{id}/explain`, of Quire's servers alone) and the means. Does not own the model
(`planner/expectation`). A server that cannot be asked is no error: nothing is compared then.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Final

import aiohttp
import msgspec

from quire.bench.client import ClientTrace
from quire.bench.plan_check import Comparison, line_of

MOST_ASKED: Final = 64
"""Requests of a run, evenly spread; the server remembers the last 4,096."""
TIMEOUT: Final = aiohttp.ClientTimeout(total=10)


class _Time(msgspec.Struct):
    took_s: float
    expected_s: float
    n_tokens: float = 1.0


class _Expectation(msgspec.Struct):
    unknown: str | None = None
    first_token: _Time | None = None
    later_token: _Time | None = None


class _Part(msgspec.Struct):
    expectation: _Expectation


class _Answer(msgspec.Struct):
    parts: list[_Part]


class Explained(msgspec.Struct, frozen=True):
    """Of some requests of a run."""

    n_requests: int = 0
    compared: tuple[Comparison, ...] = ()
    """In milliseconds: the mean of a first token, and of each later one."""
    unknown: str = ""
    """Why the server expects nothing, in its words."""

    @property
    def line(self) -> str:
        """Behind a benchmark's table; empty where the server is not one of Quire's."""
        if self.unknown:
            return f"expected: not known, as the server says: {self.unknown}"
        of = f", of {self.n_requests} request{'s' if self.n_requests != 1 else ''} as the server explains them"
        return line_of(self.compared) + of if self.compared else ""


async def explained(session: aiohttp.ClientSession, base_url: str, traces: Sequence[ClientTrace]) -> Explained:
    """Asks for some of the requests that succeeded."""
    known = [one.request_id for one in traces if one.request_id and not one.error]
    n_asked = min(MOST_ASKED, len(known))
    found: list[_Expectation] = []
    for i in range(n_asked):
        name = urllib.parse.quote(known[i * len(known) // n_asked], safe="")
        parts = await _parts(session, f"{base_url}/v1/requests/{name}/explain")
        if not parts:
            break
        if parts[0].expectation.unknown:
            return Explained(unknown=parts[0].expectation.unknown)
        found += [part.expectation for part in parts]
    means = {
        "first token": _mean([one.first_token for one in found if one.first_token]),
        "later token": _mean([one.later_token for one in found if one.later_token]),
    }
    return Explained(len(found), tuple(Comparison(name, "ms", *mean) for name, mean in means.items() if mean))


async def _parts(session: aiohttp.ClientSession, url: str) -> list[_Part]:
    """Empty where the server does not know the request, or knows no such question."""
    try:
        async with session.get(url, timeout=TIMEOUT) as response:
            return msgspec.json.decode(await response.read(), type=_Answer).parts if response.status == 200 else []
    except (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError):
        return []


def _mean(times: Sequence[_Time]) -> tuple[float, float] | None:
    """(expected, took) in ms, each token counted once; None: there are none."""
    n_tokens = sum(one.n_tokens for one in times)
    if not n_tokens:
        return None
    expected_s, took_s = (
        sum(one.n_tokens * seconds for one, seconds in zip(times, column, strict=True)) / n_tokens
        for column in ([one.expected_s for one in times], [one.took_s for one in times])
    )
    return 1e3 * expected_s, 1e3 * took_s
