"""Why Ray's replicas cannot be started: read from what Ray Serve says of them, with tracebacks. Imports no Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from quire.core.errors import ConfigError, EngineError, LoadError, QuireError

OURS: Final = "quire.core.errors."
"""Begins the line of a replica's own error in a traceback."""
REFUSALS: Final = frozenset((ConfigError.__name__, LoadError.__name__))
MOST: Final = 600
"""Characters of what is Ray's alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """What is told of it."""

    words: str
    is_refusal: bool
    """Options or the checkpoint are in the way, so that others would end so, too."""

    def error(self, what: str) -> QuireError:
        """What a single engine would raise: ConfigError where it is a refusal, else EngineError."""
        return (ConfigError if self.is_refusal else EngineError)(f"{what}: {self.words}")


def last_line(text: str) -> str:
    """Of a traceback: what it is about."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "Ray does not say why")


def reason_of(texts: Sequence[str]) -> Reason:
    """Of texts of Ray. The error of a replica says it all, without the tracebacks around it."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
    if not ours:
        return Reason(" ".join(lines)[-MOST:] or "Ray does not say why", is_refusal=False)
    name, _, words = ours[-1].partition(": ")
    return Reason(words, is_refusal=name in REFUSALS)
