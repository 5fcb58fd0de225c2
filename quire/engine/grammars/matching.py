"""Inside a process that holds matchers of an engine: answers `Begin` and `Turn`, compiles beside that.

Owns the order of work and how long each piece may take. Does not own matchers (`text/matchers`).
Invariants: what the process works on stands in the shared memory while it does; a piece of work that takes too much
processor time ends the process, by the kernel.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import mmap
import os
import queue
import select
import signal
import threading
import time
from typing import Final

import numpy as np

from quire.core.errors import RequestError
from quire.engine.grammars.wire import (
    MANY_CORES,
    REPEATED_TOKENS,
    REPEATS,
    SPIN_S_ON_MANY_CORES,
    Begin,
    Begun,
    Channel,
    GrammarSettings,
    Order,
    Turn,
    Turned,
    decode_order,
    encode,
)
from quire.text.grammar import GrammarCompiler
from quire.text.matcher import Matcher
from quire.text.matchers import End, Matchers, failed

WORK_S: Final = 0.5
"""Processor seconds that all moves of a turn, or one mask made alone, may take at the very most."""
TOGETHER_S: Final = 1.0
"""The same for masks that are made together: after that they are made one by one, by another process."""
COMPILE_FACTOR: Final = 4.0
COMPILE_SPARE_S: Final = 1.0
"""A grammar may take so many times, and so much more, than it took in its trial."""
SPIN_S: Final = 8 * SPIN_S_ON_MANY_CORES if (os.cpu_count() or 1) >= MANY_CORES else 0.0
"""As long as the steps of a small model: the next turn is likely to come, and to wake all processes takes the engine
longer than all else that it does for masks."""
STACK_BYTES: Final = 64 << 20
MOST_FORETOLD: Final = 32
"""Sequences of a step up to which it is looked what they must say: 3 to 20 µs each, and in larger steps drafts gain
little."""


@dataclasses.dataclass(slots=True)
class _Compiling:
    """A grammar under work in the second thread, and when it is to be given up."""

    order: Begin
    allowed_s: float


class MatcherProcess:
    """See the module. One thread answers, a second one compiles."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        settings: GrammarSettings,
        connection: Channel,
        marks: mmap.mmap,
        masks: mmap.mmap,
    ) -> None:
        self._compiler = compiler
        self._connection = connection
        self._bits = np.frombuffer(masks, "<i4").reshape(-1, settings.n_words)
        self._marks = memoryview(marks).cast("q")
        connection.attach(self._marks, is_engine=False)
        self._matchers = Matchers(self._marks, self._watch)
        self._waiting: queue.SimpleQueue[Begin] = queue.SimpleQueue()
        self._compiled: queue.SimpleQueue[tuple[Begin, Matcher | RequestError]] = queue.SimpleQueue()
        self._compiling: dict[int, _Compiling] = {}
        """Handed to the second thread and not taken back, by first handle, in order."""
        self._repeated, self._n_repeats = Turn([], []), 0
        """What is repeated, and how often something was since the process began."""
        self._wake_read, self._wake_write = os.pipe()
        self._spent_s = 0.0
        """Of the second thread, when the oldest of these began."""
        threading.stack_size(STACK_BYTES)
        self._thread = threading.Thread(target=self._compile, daemon=True)
        self._thread.start()
        self._clock = time.pthread_getcpuclockid(self._thread.ident or 0)

    def run(self) -> None:
        """Until the other end is closed. The work is done in a thread with a large stack."""
        with concurrent.futures.ThreadPoolExecutor(1) as worker:
            worker.submit(self._serve).result()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            self._rest()
            if not self._connection.waits(0.0, SPIN_S):
                self._connection.sleep(poll)
            while not self._compiled.empty():
                os.read(self._wake_read, 1)
                self._take_compiled()
            if self._marks[REPEATS[0]] > self._n_repeats:
                self._connection.take_silently()
                self._repeat()
            elif self._connection.has_message():  # not only a bell, of what is silent and came behind the look above
                try:
                    order = decode_order(self._connection.receive())
                except EOFError:
                    return
                self._handle(order)

    def _handle(self, order: Order) -> None:
        if isinstance(order, Begin):
            self._marks[0] = order.handles[0]
            self._watch(False)
            matcher = self._compiler.cached(order.grammar)
            if matcher is not None:
                self._begin(order, matcher)
                return
            allowed_s = COMPILE_FACTOR * order.compile_s + COMPILE_SPARE_S
            self._compiling[order.handles[0]] = _Compiling(order, allowed_s)
            self._waiting.put(order)
        elif isinstance(order, Turn):
            self._repeated = Turn([], order.rows, order.lines)
            self._connection.send(encode(self._turn(order)))

    def _repeat(self) -> None:
        """The last turn again, with other tokens."""
        self._n_repeats, turn = self._marks[REPEATS[0]], self._repeated
        tokens = self._marks[REPEATED_TOKENS : REPEATED_TOKENS + len(turn.rows)].tolist()
        turn.moves = [(handle, [token]) for handle, token in zip(turn.rows, tokens, strict=True)]
        turned = self._turn(turn)
        if turned.ends:
            self._connection.send(encode(turned))
        else:
            self._marks[REPEATS[1]] = self._n_repeats
            self._connection.send_silently()

    def _turn(self, order: Turn) -> Turned:
        self._matchers.drop(order.dropped)
        turned = Turned(self._matchers.advance(order.moves))
        if order.rows:
            turned.ends += self._matchers.fill(
                order.rows, self._bits, order.drafts, lines=order.lines, unfollowed=order.unfollowed,
                one_by_one=order.one_by_one,
            )  # fmt: skip
            if order.most_foretold and len(order.rows) <= MOST_FORETOLD:
                rows = [0 if handle in order.unfollowed else handle for handle in order.rows]
                turned.foretold = self._matchers.foretell(rows, self._bits, order.most_foretold)
        return turned

    def _take_compiled(self) -> None:
        order, found = self._compiled.get()
        del self._compiling[order.handles[0]]
        self._spent_s = time.clock_gettime(self._clock)
        if isinstance(found, Matcher):
            self._begin(order, found)
        else:  # its trial went well: only chance, such as want of memory, leads here
            ends = [End(handle, failed(found.message)) for handle in order.handles]
            self._connection.send(encode(Begun(order.handles, ends)))

    def _begin(self, order: Begin, matcher: Matcher) -> None:
        lead = order.lead
        make = (lambda: None) if lead is None else lambda: self._compiler.leading(lead)
        ends = self._matchers.begin(order.handles, matcher, order.tokens, make)
        self._connection.send(encode(Begun(order.handles, ends)))

    def _compile(self) -> None:
        """The second thread."""
        while True:
            order = self._waiting.get()
            self._marks[1] = order.handles[0]
            found: Matcher | RequestError
            try:
                found = self._compiler.compile(order.grammar)
            except RequestError as error:
                found = error
            self._marks[1] = 0
            self._compiled.put((order, found))
            os.write(self._wake_write, b"x")

    def _watch(self, together: bool) -> None:
        """A piece of work begins, and its time with it. The timer counts what the second thread uses too."""
        limit_s = TOGETHER_S if together else WORK_S
        signal.setitimer(signal.ITIMER_PROF, limit_s + self._compile_left_s())

    def _rest(self) -> None:
        """Nothing to do but what the second thread does."""
        self._marks[0] = 0
        signal.setitimer(signal.ITIMER_PROF, self._compile_left_s())

    def _compile_left_s(self) -> float:
        """Processor time that grammars under work may still use; 0 if there is none."""
        if not self._compiling:
            return 0.0
        spent_s = time.clock_gettime(self._clock) - self._spent_s
        return max(0.001, sum(one.allowed_s for one in self._compiling.values()) - spent_s)
