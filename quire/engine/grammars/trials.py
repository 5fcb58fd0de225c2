"""Trials of grammars: which comes next, what has passed, what may not come again.

Owns the queue of trials, which tenants share fairly, and the memory of what was found. Does not own the processes
(`processes.py`) nor matchers (`link.py`).
Invariants: at most `MAX_WAITING_OF_TENANT` trials of one tenant wait, `MAX_WAITING` in all; nothing here waits for
longer than `WAIT_S`; what is remembered is bounded in bytes and in time.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import os
import signal
import threading
import time
from typing import Final

import msgspec

from quire.core.errors import EngineError, GrammarsBusy, QuireError
from quire.core.structured import StructuredOutputsParams
from quire.engine.grammars.processes import GrammarProcesses, hear
from quire.engine.grammars.wire import TRIAL, Died, GrammarTrial, encode
from quire.text.grammar import refused
from quire.text.grammar_trial import Verdict

MAX_THREADS: Final = 4
"""Trials of any size at once at most, and no more than a quarter of the cores: they compete with the engine."""
MAX_WAITING: Final = 1024
MAX_WAITING_OF_TENANT: Final = 256
WAIT_S: Final = 30.0
"""Longest wait for a trial to begin."""
WALL_FACTOR: Final = 10.0
"""A trial may take so many times its processor time before it counts as hung: the machine may be busy."""
LARGE_CHARS_S: Final = 100e-6
"""A trial stands behind those that come up to so many seconds later for each of its characters, if they are shorter:
about ten times what a large schema takes."""
MAX_PASSED_BYTES: Final = 64 << 20
MAX_BANNED: Final = 4096
BAN_S: Final = 600.0
MAX_STRIKES: Final = 3
"""Constraints of one tenant and kind (regex, grammar, ...) that may end the process of matchers within `BAN_S`; then no
new one of that tenant and kind is taken for as long. Without keys all are one tenant: whoever sends grammars that loop
must not take schemas and choices from the others."""
SMALL_CHARS: Final = 4096
"""One thread takes nothing larger, so that small ones do not wait for the seconds that large ones take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """A grammar that has passed its trial."""

    grammar: str
    compile_s: float


@dataclasses.dataclass(slots=True)
class _Waiting:
    params: StructuredOutputsParams
    due: float
    began_s: float
    future: concurrent.futures.Future[Passed]
    is_small: bool
    is_running: bool = False


def key_of(params: StructuredOutputsParams) -> tuple[bytes, int]:
    """What makes a constraint the same when it comes again, and about how many characters it has."""
    encoded = msgspec.msgpack.encode(params)
    return hashlib.blake2b(encoded, digest_size=16).digest(), len(encoded)


class GrammarTrials:
    """See the module. `submit` from one thread; the trials run beside it."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self._processes = processes
        self._passed: collections.OrderedDict[bytes, Passed] = collections.OrderedDict()
        self._passed_bytes = 0
        self._banned: collections.OrderedDict[bytes, tuple[float, str]] = collections.OrderedDict()
        self._strikes: dict[tuple[str, str], collections.deque[float]] = {}
        self._news = threading.Condition()
        """Guards all that follows, and what is above."""
        self._waiting: dict[str, dict[bytes, _Waiting]] = {}
        self._spent_s: dict[str, float] = {}
        """Time that trials of tenants which wait have taken, with a head start that lets nobody save up."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def passed(self, key: bytes) -> Passed | None:
        """A grammar that is known to be good."""
        with self._news:
            found = self._passed.get(key)
            if found is not None:
                self._passed.move_to_end(key)
            return found

    def submit(
        self, key: bytes, n_chars: int, params: StructuredOutputsParams, tenant: str
    ) -> concurrent.futures.Future[Passed]:
        """Put a grammar to trial. The future raises RequestError if it is of no use, GrammarsBusy if it waits too long;
        this raises them for what is known already."""
        with self._news:
            self._check_banned(key)
            self._check_strikes(tenant, params.kind)
            own = self._waiting.setdefault(tenant, {})
            found = own.get(key)
            if found is not None:
                return found.future
            if len(own) >= MAX_WAITING_OF_TENANT or sum(map(len, self._waiting.values())) >= MAX_WAITING:
                raise GrammarsBusy(f"{len(own)} grammars of this sender wait to be compiled: try again later")
            now_s = time.monotonic()
            if not own:
                others = [self._spent_s[one] for one in self._waiting if one != tenant]
                self._spent_s[tenant] = max(self._spent_s.get(tenant, 0.0), min(others, default=0.0))
            future: concurrent.futures.Future[Passed] = concurrent.futures.Future()
            own[key] = _Waiting(params, now_s + n_chars * LARGE_CHARS_S, now_s, future, n_chars <= SMALL_CHARS)
            self._start_thread()
            self._news.notify_all()
            return future

    def ban(self, key: bytes, tenant: str, kind: str, reason: str) -> None:
        """A grammar has ended the process of matchers after all: it is not taken again, and neither are others of its
        tenant and kind, if that goes on."""
        with self._news:
            now_s = time.monotonic()
            found = self._passed.pop(key, None)
            self._passed_bytes -= 0 if found is None else len(found.grammar)
            self._remember(key, now_s, reason)
            self._strikes.setdefault((tenant, kind), collections.deque(maxlen=MAX_STRIKES)).append(now_s)

    def close(self) -> None:
        """Forget what waits. The trial under way ends with the processes."""
        with self._news:
            self._is_closed = True
            for own in self._waiting.values():
                for one in own.values():
                    one.future.cancel()
            self._waiting.clear()
            self._news.notify_all()

    def _start_thread(self) -> None:
        """One more, unless there are enough: the second takes what is small alone, the others everything."""
        n_most = 1 + max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 4))
        if len(self._threads) < n_most:
            args = (len(self._threads) == 1,)
            thread = threading.Thread(target=self._work, args=args, daemon=True, name="quire-grammar-trials")
            self._threads.append(thread)
            thread.start()

    def _remember(self, key: bytes, now_s: float, reason: str) -> None:
        self._banned[key] = now_s, reason
        while len(self._banned) > MAX_BANNED:
            self._banned.popitem(last=False)

    def _check_banned(self, key: bytes) -> None:
        banned_s, reason = self._banned.get(key, (0.0, ""))
        if reason and time.monotonic() - banned_s < BAN_S:
            raise refused(reason)
        self._banned.pop(key, None)

    def _check_strikes(self, tenant: str, kind: str) -> None:
        strikes = self._strikes.get((tenant, kind))
        if strikes is None or len(strikes) < MAX_STRIKES:
            return
        left_s = strikes[0] + BAN_S - time.monotonic()
        if left_s > 0:
            raise GrammarsBusy(
                f"{MAX_STRIKES} constraints of kind {kind} of this sender had to be stopped within {BAN_S / 60:g} "
                f"minutes: those of this kind that are not known yet are taken again in {left_s:.0f} s"
            )
        del self._strikes[tenant, kind]

    # ---- the thread of trials

    def _work(self, only_small: bool) -> None:
        while True:
            with self._news:
                while (found := self._next(only_small)) is None and not self._is_closed:
                    self._news.wait()
                if found is None:
                    return
                tenant, key, one = found
                one.is_running = True
            if not one.future.set_running_or_notify_cancel():
                self._done(tenant, key, 0.0)
                continue
            start_s = time.monotonic()
            error: QuireError | None = None
            passed: Passed | None = None
            try:
                if start_s - one.began_s > WAIT_S:
                    raise GrammarsBusy(f"the grammar waited for {WAIT_S:g} s to be compiled: try again later")
                passed = self._try(one.params)
            except QuireError as refusal:
                error = refusal
            self._done(tenant, key, time.monotonic() - start_s, passed)
            if passed is None:
                one.future.set_exception(error)
            else:
                one.future.set_result(passed)

    def _next(self, only_small: bool) -> tuple[str, bytes, _Waiting] | None:
        """Of the tenant that has had the least, the one that is due first."""
        for tenant in sorted(self._waiting, key=lambda one: self._spent_s.get(one, 0.0)):
            idle = {key: one for key, one in self._waiting[tenant].items() if not one.is_running}
            ready = {key: one for key, one in idle.items() if one.is_small or not only_small}
            if ready:
                key = min(ready, key=lambda one: ready[one].due)
                return tenant, key, ready[key]
        return None

    def _done(self, tenant: str, key: bytes, taken_s: float, found: Passed | None = None) -> None:
        with self._news:
            own = self._waiting.get(tenant, {})
            own.pop(key, None)
            self._spent_s[tenant] = self._spent_s.get(tenant, 0.0) + taken_s
            if not own:
                self._waiting.pop(tenant, None)
            if not self._waiting:
                self._spent_s.clear()
            if found is not None:
                self._passed[key] = found
                self._passed_bytes += len(found.grammar)
                while self._passed_bytes > MAX_PASSED_BYTES and len(self._passed) > 1:
                    self._passed_bytes -= len(self._passed.popitem(last=False)[1].grammar)

    def _try(self, params: StructuredOutputsParams) -> Passed:
        """Raises RequestError for a grammar that is refused or that has ended its process."""
        settings = self._processes.settings
        with self._processes.fork(TRIAL) as child:
            try:
                child.send(encode(GrammarTrial(params)))
                is_answered = child.waits(WALL_FACTOR * (settings.compile_s + 1))
            except OSError:
                is_answered = True
            report = hear(child) if is_answered else Died(signal.SIGPROF)
        if isinstance(report, Verdict):
            error = report.error()
            if error is not None:
                raise error
            return Passed(report.grammar, report.compile_s)
        raise self._refused(params, report if isinstance(report, Died) else Died())

    def _refused(self, params: StructuredOutputsParams, died: Died) -> QuireError:
        """Why a trial had no verdict. Dear ones are not made twice."""
        settings = self._processes.settings
        if died.signal == signal.SIGPROF:
            reason = f"it takes more than {settings.compile_s:g} s to compile, or to follow; make it smaller"
        elif died.signal == signal.SIGKILL:  # also from outside
            return refused("the system ended its compilation, as it does when memory runs out; make it smaller")
        elif died.signal:
            reason = "it is nested too deeply, or takes too much memory to compile; make it smaller"
        elif died.why:
            reason = f"it cannot be compiled ({died.why})"
        else:
            how = self._processes.ending(died)
            return EngineError(f"the trial of this grammar has ended ({how}): send it again")
        with self._news:
            self._remember(key_of(params)[0], time.monotonic(), reason)
        return refused(reason)
