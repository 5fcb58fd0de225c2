"""Fields of one API under the names of another. Owns how a refusal is reworded; does not own which names there are."""

from __future__ import annotations

import dataclasses

from quire.serve.http.refusal import Refusal
from quire.serve.openai.schema import ChatRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Translated:
    """A request of another API in chat's words, and what its fields are called in the client's."""

    chat: ChatRequest
    names: dict[str, str]
    """Chat's field, or the beginning of its path → the client's."""


def renamed(refusal: Refusal, names: dict[str, str]) -> Refusal:
    """The same refusal in the words of an API with other names.

    names: a field, or the beginning of its path → what the client calls it; the longest that fits counts.
    """
    ours = max((name for name in names if _begins(refusal.param, name)), key=len, default=None)
    if ours is None:
        return refusal
    refusal.message = refusal.message.replace(ours, names[ours])
    refusal.param = names[ours] + (refusal.param or "")[len(ours) :]
    return refusal


def _begins(param: str | None, name: str) -> bool:
    return param is not None and param.startswith(name) and param[len(name) :][:1] in ("", ".", "[")
