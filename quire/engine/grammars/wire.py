"""What an engine and its grammar processes say to each other: msgpack of these values over socket pairs, and silent
messages: numbers in memory that an engine shares with a process of matchers. No stranger writes to these sockets.

Order of a silent message: what it says is written first, then the bell, then whoever sleeps is woken.
"""

from __future__ import annotations

import platform
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

import msgspec

from quire.core.plan import SpanDrafts
from quire.core.structured import StructuredOutputsParams
from quire.text.grammar_trial import Verdict
from quire.text.leading import LeadBound
from quire.text.matchers import End, Foretold

TRIAL: Final = b"trial"
MATCHERS: Final = b"matchers"
"""What the first process is asked for."""
LEFT_ALONE: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)
"""Signals that mean nothing to these processes: the engine decides when they end. Blocked until they can be ignored."""
SEND_LIMIT_S: Final = 5.0
"""A process that does not read for so long is hung."""
MARKS: Final = struct.Struct("=qq")
"""In the memory that a process of matchers shares with its link, handles or 0: whose matcher moves or is asked for a
mask, as `matchers.Matchers` marks it; and whose grammar is being compiled beside that."""
BELLS: Final = (2, 3)
"""Behind these, as int64: how many messages the engine has sent, and how many the process; silent ones count."""
SLEEPS: Final = (4, 5)
"""Whether the engine, and the process, sleep: they are woken then, by a message."""
REPEATS: Final = (6, 7)
"""Turns that are as the one before but for their tokens: how many the engine has asked for, and the newest of them that
is done and of which there is nothing to say."""
REPEATED_TOKENS: Final = 8
"""Where their tokens begin, one for each row."""
MAY_REPEAT: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether others see what a process writes in that order: silent messages rely on it."""
LOST_S: Final = 0.005
"""Who falls asleep looks again after so long: a silent message may have come in that very moment."""
MANY_CORES: Final = 8
SPIN_S_ON_MANY_CORES: Final = 0.0005
"""How long either end waits awake for the other, on a machine with so many cores."""


def shared_bytes(n_rows: int) -> int:
    """Of the memory that a process of matchers shares with its link. n_rows: of a turn, at most."""
    return 8 * (REPEATED_TOKENS + n_rows)


class GrammarSettings(msgspec.Struct):
    """What the processes of one engine need to know."""

    folder: str
    """Of the tokenizer, or a GGUF file."""
    vocab_size: int
    """Logits."""
    end_token_ids: list[int]
    n_words: int
    """Of a mask."""
    n_rows: int
    """Masks of one step at most."""
    n_processes: int
    """Of matchers, at most."""
    compile_s: float
    """Processor seconds that translating and compiling one grammar may take."""
    compile_bytes: int
    """Memory that it may take."""


class GrammarTrial(msgspec.Struct, tag=True):
    """To a process for one trial: say whether this is of use."""

    params: StructuredOutputsParams


class Begin(msgspec.Struct, tag=True):
    """To a process of matchers: the sequences of one request are going to need masks. Answered by `Begun`."""

    handles: list[int]
    grammar: str
    compile_s: float
    tokens: list[list[int]]
    """What each sequence has already."""
    lead: LeadBound | None = None


class Begun(msgspec.Struct, tag=True):
    """Its grammar is compiled, and each sequence is where its tokens led."""

    handles: list[int]
    ends: list[End]


class Turn(msgspec.Struct, tag=True):
    """Move sequences, forget some, and write masks into the memory that all share. Answered by `Turned`."""

    moves: list[tuple[int, list[int]]]
    rows: list[int]
    """A handle for each mask; one that is not known may go on with anything."""
    lines: list[int] = []
    """Where each of these masks is to be."""
    drafts: list[SpanDrafts] = []
    """Tokens that may follow each of these; a mask for each, behind that of its handle. Empty: there are none."""
    dropped: list[int] = []
    unfollowed: list[int] = []
    """Handles along whose drafts nothing is done: that has ended a process."""
    one_by_one: bool = False
    most_foretold: int = 0
    """Tokens to be foretold of each row."""


class Turned(msgspec.Struct, tag=True):
    """The masks are there."""

    ends: list[End]
    foretold: list[Foretold] = []
    """Of each row, if that was asked for."""


class Nudge(msgspec.Struct, tag=True):
    """Either way: wake up, there is a silent message."""


class Died(msgspec.Struct, tag=True):
    """The last word of a process that ended before its time, mostly from its parent."""

    signal: int = 0
    """By which it was ended, 0 for none."""
    why: str = ""
    """More than a signal says: where in our code it failed, or that it was silent for too long."""


Order = GrammarTrial | Begin | Turn | Nudge
Report = Verdict | Begun | Turned | Died | Nudge

_LENGTH: Final = struct.Struct("=I")
_SLEEP: Final = SLEEPS[0] - BELLS[0]

encode = msgspec.msgpack.Encoder().encode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


class Channel:
    """One end of a socket pair, which it takes over: messages, each after its length. For one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_LIMIT_S), 0))
        self._end = end
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._bells: memoryview[int] | None = None
        self._own, self._other = BELLS
        self._n_received = 0

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _place: TracebackType | None) -> None:
        self.close()

    def attach(self, bells: memoryview[int], *, is_engine: bool) -> None:
        """Memory that both ends share, in which each counts what it sends: who waits awake looks there, without a
        system call, which holds up those of others on some machines. Before the first message."""
        self._bells = bells
        self._own, self._other = BELLS if is_engine else BELLS[::-1]

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Raises OSError if the other end is gone, or does not read for `SEND_LIMIT_S`."""
        self._end.sendall(_LENGTH.pack(len(message)) + message)
        if self._bells is not None:
            self._bells[self._own] += 1

    def send_silently(self) -> None:
        """What is to be said stands in the shared memory. Raises OSError as `send`."""
        assert self._bells is not None
        self._bells[self._own] += 1
        if self._bells[self._other + _SLEEP]:
            self.send(encode(Nudge()))

    def take_silently(self) -> None:
        """It was read there: in place of `receive`."""
        self._n_received += 1

    def waits(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Whether there is something to receive: a message, silent or not, or the end. spin_s: how much of the wait is
        done awake, where bells are attached and a core is free for it: being woken takes longer than most answers."""
        if self._unread or self._rings():
            return True
        if spin_s and self._bells is not None:
            end_s = time.perf_counter() + spin_s
            while time.perf_counter() < end_s:
                if self._bells[self._other] > self._n_received:
                    return True
        return self.sleep(self._poll, timeout_s * 1000) if timeout_s else self.has_message()

    def has_message(self) -> bool:
        """Whether `receive` has something to read: what is silent does not count, and may be all that `waits` saw."""
        return bool(self._unread) or bool(self._poll.poll(0))

    def sleep(self, poll: select.poll, timeout_ms: float | None = None) -> bool:
        """Wait for what `poll` waits for, this end and perhaps more, or a silent message."""
        if self._bells is None:
            return bool(poll.poll(timeout_ms))
        self._bells[self._own + _SLEEP] = 1
        first_ms = LOST_S * 1000 if timeout_ms is None else min(LOST_S * 1000, timeout_ms)
        try:
            if self._rings() or poll.poll(first_ms) or self._rings():
                return True
            return first_ms != timeout_ms and bool(poll.poll(None if timeout_ms is None else timeout_ms - first_ms))
        finally:
            self._bells[self._own + _SLEEP] = 0

    def _rings(self) -> bool:
        return self._bells is not None and self._bells[self._other] > self._n_received

    def receive(self) -> bytes:
        """The next message. Raises EOFError at the end, also amid a message, and OSError."""
        while True:
            if len(self._unread) >= _LENGTH.size:
                stop = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
                if len(self._unread) >= stop:
                    message = bytes(self._unread[_LENGTH.size : stop])
                    del self._unread[:stop]
                    self._n_received += 1
                    return message
            data = self._end.recv(1 << 16)
            if not data:
                raise EOFError
            self._unread += data

    def close(self) -> None:
        """The other end hears of it."""
        self._end.close()
