"""Reading what clients send: a message that cannot be understood harms nobody but its sender.

Owns decoding of commands, and the answer to those that cannot be decoded.
"""

from __future__ import annotations

import logging

import msgspec

from quire.core.commands import Command
from quire.core.errors import InvalidParameter, QuireError
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code, Failure
from quire.core.request import Request
from quire.core.sampling import MAX_N
from quire.engine.wire import decode_commands

logger = logging.getLogger("quire.engine")
_UNREAD = (msgspec.DecodeError, InvalidParameter)
"""The second is for values that only their own type finds bad."""


def read_commands(message: bytes) -> tuple[list[Command], list[SeqDelta]]:
    """The commands of a message that can be decoded, and error ends for submissions that cannot; the rest is logged."""
    try:
        return decode_commands(message), []
    except _UNREAD as error:
        logger.error("a message of %d bytes cannot be decoded as a whole: %s", len(message), error)
    commands: list[Command] = []
    refused: list[SeqDelta] = []
    try:
        parts = msgspec.msgpack.decode(message, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        return [], []
    for part in parts:
        try:
            commands.append(msgspec.msgpack.decode(part, type=Command))
        except _UNREAD as error:
            logger.error("a command was dropped: %s", error)
            refused += _refuse_unread(part, error)
    return commands, refused


class _UnreadParams(msgspec.Struct):
    n: int = 1


class _UnreadRequest(msgspec.Struct):
    request_id: str
    params: _UnreadParams


class _UnreadSubmit(msgspec.Struct, tag="submit"):
    """What must be known of a submission to refuse it."""

    request: _UnreadRequest


def _refuse_unread(part: msgspec.Raw, error: Exception) -> list[SeqDelta]:
    try:
        request = msgspec.msgpack.decode(part, type=_UnreadSubmit).request
    except msgspec.DecodeError:
        return []
    failure = Failure(Code.ENGINE_ERROR, f"not understood: {error}")
    return _ends(request.request_id, min(request.params.n, MAX_N), failure)


def refusals(request: Request, error: QuireError) -> list[SeqDelta]:
    """The ends of a request's sequences, which never started."""
    return _ends(request.request_id, request.params.n, error.failure())


def _ends(request_id: str, n: int, failure: Failure) -> list[SeqDelta]:
    return [SeqDelta(request_id, i, [], FinishReason.ERROR, failure=failure) for i in range(n)]
