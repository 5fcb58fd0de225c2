"""What clients ask of an engine: submissions, cancellations, questions and orders. What it answers: `events.py`."""

from __future__ import annotations

from typing import Union

import msgspec

from quire.core.request import Request


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """On what terms a request runs of which an engine may have died."""

    n_tokens: int
    """It has come through once each of its sequences has so many output tokens, or has ended."""
    rank: tuple[int, ...]
    """Of two that wait for their trial the smaller is tried first."""


class Submit(msgspec.Struct, tag="submit"):
    """Queue a request."""

    request: Request
    trial: Trial | None = None
    """Run it apart from others of which the engine may have died."""


class Cancel(msgspec.Struct, tag="cancel"):
    """End these requests now (exact ids; unknown ids are ignored). No further delta follows for them."""

    request_ids: list[str]


class CancelSeq(msgspec.Struct, tag="cancel_seq"):
    """End one of a request's `n` sequences (its stop string was seen). No further delta follows for it."""

    request_id: str
    index: int


class Hello(msgspec.Struct, tag="hello"):
    """The first message of a client; the engine answers it with EngineReady once it is loaded."""


class Explain(msgspec.Struct, tag="explain"):
    """Ask why requests took as long as they did; the answer is one Explained with the same ticket."""

    ticket: int
    label: str
    """Of the requests: the part of their labels before the last hyphen."""


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Leave the loop and free everything."""


class FollowPrefixes(msgspec.Struct, tag="follow_prefixes"):
    """Ask to be told from now on what the prefix trees hold: all of it, in PrefixUpdates from number 0 on, then what
    changes. Asked again with the same ticket it begins anew."""

    ticket: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget the pages that no open request holds; the answer is one Done, whose value says whether none are left."""

    ticket: int


class Sleep(msgspec.Struct, tag="sleep"):
    """End every request and give memory back; the answer is one Done."""

    ticket: int
    level: int
    """1 gives up the pages and keeps the weights in the host's memory; 2 gives up both."""


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Bring back what was given up; the answer is one Done."""

    ticket: int


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Read an adapter, from inside the folder that the engine was told, and give it a name; the answer is one Done."""

    ticket: int
    name: str
    path: str
    in_place: bool = False
    """The name may be another's, which it takes over."""


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Take a name away from an adapter; the answer is one Done."""

    ticket: int
    name: str


Order = Union[ResetPrefixCache, Sleep, WakeUp, LoadAdapter, UnloadAdapter]
"""What an operator asks of an engine."""

Command = Union[Submit, Cancel, CancelSeq, Explain, FollowPrefixes, Hello, Shutdown, Order]
