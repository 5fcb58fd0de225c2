"""The processes in which strangers' grammars are compiled and followed: `python -m quire.engine.grammars.process FD`.

The first process loads the tokenizer once and then only forks: a child for each trial of a grammar, and some that hold
the matchers of all sequences. It runs no grammar itself, so it always answers. FD is a socket pair's end; each message
on it asks for a child and brings the child's end of another pair (and its shared memory).
Invariants: no process outlives the engine; a child whose other end is closed is killed, however it loops; a child that
takes too much processor time, stack or memory is ended by the kernel, and its parent says so on its socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pathlib
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from quire.engine.grammars.matching import MatcherProcess
from quire.engine.grammars.wire import (
    LEFT_ALONE,
    MATCHERS,
    TRIAL,
    Channel,
    Died,
    GrammarSettings,
    GrammarTrial,
    decode_order,
    encode,
)
from quire.text.grammar import CACHE_BYTES, MAX_CACHED_BYTES, GrammarCompiler
from quire.text.grammar_trial import tried
from quire.text.tokenizer import HfTokenizer

MAX_SETTINGS_BYTES: Final = 1 << 20
WALK_S: Final = 0.5
"""Processor seconds after which following a grammar has gone wrong: it looks at the clock long before."""
TRIAL_STACK_BYTES: Final = 16 << 20
"""Less than a process of matchers has, so that what passes here fits there."""
_PR_SET_PDEATHSIG: Final = 1

Serve = Callable[[GrammarCompiler, GrammarSettings, Channel, mmap.mmap, mmap.mmap], None]


def serve_matchers(
    compiler: GrammarCompiler,
    settings: GrammarSettings,
    connection: Channel,
    marks: mmap.mmap,
    masks: mmap.mmap,
) -> None:
    """The life of a process of matchers."""
    MatcherProcess(compiler, settings, connection, marks, masks).run()


class ForkServer:
    """The first process: its children, and copies of their ends of the sockets."""

    def __init__(self, control: socket.socket, serve: Serve) -> None:
        self._control = control
        self._serve = serve
        self._settings = msgspec.msgpack.decode(control.recv(MAX_SETTINGS_BYTES), type=GrammarSettings)
        self._compiler = _compiler(self._settings)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._ends: dict[int, tuple[int, socket.socket]] = {}
        """pidfd of a child → its id, and our copy of its end."""
        self._unwanted: dict[int, int] = {}
        """That copy's descriptor → the child."""

    def run(self) -> None:
        """Until the engine closes the control socket."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    kind, fds, _, _ = socket.recv_fds(self._control, len(MATCHERS), 3)
                    if not kind:
                        return
                    self._fork(kind, fds)
                elif fd in self._unwanted:  # the engine has closed the other end: nobody wants an answer
                    os.kill(self._unwanted.pop(fd), signal.SIGKILL)
                    self._poll.unregister(fd)
                elif fd in self._ends:
                    self._reap(fd)

    def _fork(self, kind: bytes, fds: list[int]) -> None:
        end = socket.socket(fileno=fds[0])
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._live(kind, end, fds[1:], parent)
        for fd in fds[1:]:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._ends[pidfd], self._unwanted[end.fileno()] = (pid, end), pid
        self._poll.register(pidfd, select.POLLIN)
        self._poll.register(end, 0)  # its hang-up is told in any case

    def _reap(self, pidfd: int) -> None:
        """A child has ended. If that was not its own doing, its socket says so as its last word."""
        pid, end = self._ends.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self._unwanted.pop(end.fileno(), None) is not None:
            self._poll.unregister(end)
        connection = Channel(end)
        with contextlib.suppress(OSError), connection:
            if code:
                connection.send(encode(Died(max(0, -code))))

    def _live(self, kind: bytes, end: socket.socket, fds: list[int], parent: int) -> NoReturn:
        """The whole life of a child. It leaves without a word of Python's: that is its parent's to say."""
        code, connection = 1, Channel(end)
        try:
            _be_killed_with(parent)
            for _, other in self._ends.values():
                other.close()
            self._control.close()
            _hide_output()
            if kind == TRIAL:
                _serve_trial(self._compiler, self._settings, connection)
            else:
                self._serve(self._compiler, self._settings, connection, *(mmap.mmap(fd, 0) for fd in fds))
            code = 0
        except Exception as error:
            with contextlib.suppress(OSError):
                connection.send(encode(Died(why=place_of(error))))
            code = 0
        finally:
            os._exit(code)


def _serve_trial(compiler: GrammarCompiler, settings: GrammarSettings, connection: Channel) -> None:
    _limit(resource.RLIMIT_STACK, TRIAL_STACK_BYTES)
    _limit(resource.RLIMIT_AS, _virtual_bytes() + settings.compile_bytes)
    order = decode_order(connection.receive())
    if isinstance(order, GrammarTrial):
        # The kernel ends the process when this timer has run out: it counts processor time, native code's too.
        signal.setitimer(signal.ITIMER_PROF, settings.compile_s)
        verdict = tried(compiler, order.params, lambda: signal.setitimer(signal.ITIMER_PROF, WALK_S))
        connection.send(encode(verdict))


def place_of(error: BaseException) -> str:
    """Where an exception was raised, without its message, which may repeat a grammar."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}"


def _compiler(settings: GrammarSettings) -> GrammarCompiler:
    tokenizer = HfTokenizer.load(pathlib.Path(settings.folder), settings.vocab_size)
    cache_bytes = max(MAX_CACHED_BYTES, CACHE_BYTES // settings.n_processes)
    compiler = GrammarCompiler(tokenizer, settings.vocab_size, settings.end_token_ids, cache_bytes)
    compiler.prepare()
    return compiler


def _be_killed_with(parent: int) -> None:
    """End with the first process, also when it is killed and this one loops."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _hide_output() -> None:
    """What the library prints when it panics holds a piece of the grammar."""
    number = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(number, fd)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _virtual_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(serve: Serve = serve_matchers) -> int:
    """Entry point of the first process. serve: what the process of matchers does; another one is for tests."""
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_ALONE)
    ForkServer(socket.socket(fileno=int(sys.argv[1])), serve).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
