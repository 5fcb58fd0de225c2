"""A connection's transport, which no client can hold by not reading, and which ends without losing the last answer.

Owns closing and the watch over unsent bytes. Does not own what is sent.
Invariants: while unsent bytes wait, the client takes some of them every `stall_s` or is cut off, after `close` too; a
client that may still be sending when it is closed gets `LINGER_S` to read the answer (closing a socket with unread
bytes in it resets the connection, and many systems then throw away what was not read yet).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from typing import Any

LINGER_S = 5.0


class BoundedTransport:
    """Stands before an asyncio transport; has what uvicorn uses of one."""

    def __init__(self, transport: asyncio.Transport, stall_s: float, may_send: Callable[[], bool]) -> None:
        """may_send: whether the client may send something more that is not wanted."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._stall_s = stall_s
        self._may_send = may_send
        self._is_closing = False
        self._is_paused = False
        self._n_unsent = 0
        self._watch: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self.get_extra_info: Callable[..., Any] = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.abort = transport.abort

    def write(self, data: bytes) -> None:
        """Send `data`, unless the connection is being closed: asyncio would log each further write."""
        if not self.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        """True from `close` on, or when the connection is lost."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Close once everything is sent."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._may_send() and not self._transport.is_closing():
            self._linger = self._loop.call_later(LINGER_S, self._transport.close)
            self._transport.resume_reading()  # what comes is thrown away by the protocol
            if self._transport.can_write_eof():  # TLS cannot
                self._transport.write_eof()
        else:
            self._transport.close()
        self._start_watch()

    def ended(self) -> None:
        """The client has sent its last byte: nothing is waited for any more."""
        self._is_closing = True
        self._transport.close()
        self._start_watch()

    def lost(self) -> None:
        """The connection is gone."""
        self._is_closing, self._is_paused, self._may_send = True, False, _never  # no cycle stays
        self._stop_watch()
        if self._linger is not None:
            self._linger.cancel()

    def set_paused(self, is_paused: bool) -> None:
        """The transport has too much to send, or no longer."""
        self._is_paused = is_paused
        if is_paused:
            self._start_watch()
        elif not self._is_closing:
            self._stop_watch()

    def _start_watch(self) -> None:
        if self._watch is None:
            self._n_unsent = self._unsent()
            self._watch = self._loop.call_later(self._stall_s, self._look)

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        self._watch = None
        n_before, self._n_unsent = self._n_unsent, self._unsent()
        if not self._n_unsent or not (self._is_paused or self._is_closing):
            return
        if self._n_unsent >= n_before:
            self._transport.abort()
        else:
            self._watch = self._loop.call_later(self._stall_s, self._look)

    def _unsent(self) -> int:
        """Bytes that the client has not acknowledged, with those in the kernel; 0 when none waits outside of it."""
        n_bytes = self._transport.get_write_buffer_size()
        found: socket.socket | None = self._transport.get_extra_info("socket")
        if not n_bytes or found is None or found.fileno() < 0:
            return n_bytes
        with contextlib.suppress(OSError):
            n_bytes += struct.unpack("i", fcntl.ioctl(found.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
        return n_bytes


def _never() -> bool:
    return False
