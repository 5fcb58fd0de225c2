"""Adapters by name: which there are, which of them the host keeps, and requests that wait for one to be read.

Owns names and the host's share of memory. Does not own places on the device (`control/adapters`) nor weights
(`compute/adapters`).
Invariants: a request has the adapter that its name stood for when it came, however names change; reading goes on in a
thread of its own, so that nobody else waits for a disk; what open requests have stays on the host; the limits on a
request's time count while it waits here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from quire.config.engine import EngineConfig
from quire.config.resolve import n_kept
from quire.control.live_seqs import LiveSeqs
from quire.control.scheduler import Scheduler
from quire.control.seq import SeqState
from quire.core.adapters import AdapterFacts, check_adapter_name, lora_module
from quire.core.clock import Clock, MonotonicClock
from quire.core.errors import ConfigError, InvalidParameter, QuireError, RequestError, RequestExpired, shown
from quire.core.events import EngineStats, SeqDelta
from quire.core.failure import Code
from quire.core.request import Request
from quire.engine.command_reader import refusals
from quire.engine.executors.executor import RanksLost
from quire.engine.time_limits import TimedRequest

logger = logging.getLogger("quire.engine")

READ_WAIT_S = 0.005
"""How long an engine with nothing else to do waits for an adapter before it looks for commands again."""

Reading = concurrent.futures.Future[tuple[str, int, Any]]
"""(hash of the content, rank, the weights)."""
Ready = tuple[Request, QuireError | None]


class AdapterReader(Protocol):
    """A worker, as far as adapters are concerned: see `compute/worker`."""

    def read_adapter(self, path: str, root: str) -> tuple[str, int, Any]: ...

    def keep_adapter(self, content_id: str, kept: Any) -> None: ...

    def drop_adapter(self, content_id: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Loading:
    """An adapter that is being read to have a name."""

    name: str
    path: str
    root: str
    reading: Reading


@dataclasses.dataclass(slots=True)
class Waiting(TimedRequest):
    """A request whose adapter is not on the host."""

    path: str
    """The folder of its adapter."""
    root: str
    """In which that must lie."""


class AdapterRegistry:
    """reader None: the engine has no adapters. in_use: hashes of those that queued and running requests have."""

    def __init__(
        self,
        reader: AdapterReader | None = None,
        max_kept: int = 0,
        in_use: Callable[[], Iterable[str]] = tuple,
        clock: Clock | None = None,
    ) -> None:
        self._reader, self._max_kept, self._in_use = reader, max_kept, in_use
        self._clock: Clock = clock or MonotonicClock()
        self._facts: dict[str, AdapterFacts] = {}
        self._coming: collections.Counter[str] = collections.Counter()
        """Names of adapters that are being read to have them."""
        self._lost: dict[str, str] = {}
        """Name → why there is no adapter under it, though one was asked for."""
        self._kept: dict[str, None] = {}
        """On the host, the least recently wanted first."""
        self._roots: dict[str, str] = {}
        """Name → the folder in which its own must lie, as it was asked for."""
        self._waiting: dict[str, Waiting] = {}
        """By the request's id."""
        self._readings: dict[str, Reading] = {}
        """Hash → being read again."""
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    @property
    def facts(self) -> list[AdapterFacts]:
        """All that have names."""
        return list(self._facts.values())

    @property
    def n_waiting(self) -> int:
        """Requests that are not queued yet."""
        return len(self._waiting)

    def refuse_all(self, error: QuireError) -> list[SeqDelta]:
        """The ends of these requests, which wait no longer."""
        waiting, self._waiting = self._waiting, {}
        return [delta for one in waiting.values() for delta in refusals(one.request, error)]

    # ---- names ---------------------------------------------------------------------------------------------------

    def begin(self, name: str, path: str, root: str = "", *, in_place: bool = False) -> Loading:
        """Read a folder, in the thread; `finish` gives it the name. root: folder in which it must lie, empty: anywhere.
        Raises RequestError or ConfigError."""
        if self._reader is None:
            raise ConfigError("this engine has no adapters: start it with --enable-lora", param="enable_lora")
        check_adapter_name(name)
        if name in self._facts and not in_place:
            raise InvalidParameter("lora_name", name, "the name of no loaded adapter", "Or set load_inplace to true.")
        if name in self._coming and not in_place:
            hint = "Wait for that one, or set load_inplace to true."
            raise InvalidParameter("lora_name", name, "the name of no adapter that is being loaded", hint)
        if not isinstance(path, str) or not path:
            raise InvalidParameter("lora_path", path, "the folder of an adapter")
        if not self._make_room():
            raise RequestError(
                f"all {self._max_kept} adapters that the host keeps are in use or being read: try again later, or start"
                " with a larger --max-cpu-loras",
                param="lora_name",
            )
        reading = self._read(path, root)
        self._coming[name] += 1
        return Loading(name, path, root, reading)

    def finish(self, loading: Loading) -> AdapterFacts:
        """It is read; to be called once. Raises what reading raised; names are what they were then."""
        try:
            content_id, rank, weights = loading.reading.result()
        finally:
            self._coming -= collections.Counter((loading.name,))
        self._keep(content_id, weights)
        self._roots[loading.name] = loading.root
        self._facts[loading.name] = facts = AdapterFacts(loading.name, loading.path, content_id, rank)
        self._lost.pop(loading.name, None)
        self._trim()
        return facts

    def load(self, name: str, path: str, root: str = "", *, in_place: bool = False) -> AdapterFacts:
        """`begin` and `finish`, and the wait between them."""
        return self.finish(self.begin(name, path, root, in_place=in_place))

    def miss(self, name: str, reason: str) -> None:
        """Requests that name it are refused, and told why."""
        self._lost[name] = reason

    def unload(self, name: str) -> None:
        """New requests cannot name it; open ones keep it. Raises RequestError for a name that nothing has."""
        if self._facts.pop(name, None) is None:
            raise RequestError(f"no adapter is loaded under the name {shown(name)}", param="lora_name")
        del self._roots[name]
        self._trim()

    # ---- requests ------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> bool:
        """Whether the request can be queued; else `ready` gives it back. It is told what its name stands for. Raises
        RequestError for a name that nothing has, or that stands for another adapter than the request was made for."""
        expected, request.content_id = request.content_id, ""
        if not request.adapter:
            return True
        name = shown(request.adapter)
        facts = self._facts.get(request.adapter)
        if facts is None and request.adapter in self._lost:
            raise RequestError(f"the adapter {name} is not loaded: {self._lost[request.adapter]}", param="model")
        if facts is None:
            words = f"no adapter is loaded under the name {name}"
            raise RequestError(words, param="model", code=Code.MODEL_NOT_FOUND)
        if expected not in ("", facts.content_id):
            raise RequestError(f"another adapter has the name {name} since the request was made: send it again")
        request.content_id = facts.content_id
        if self._want(facts.content_id):
            return True
        root, now_s = self._roots[request.adapter], self._clock.now_s()
        self._waiting[request.request_id] = Waiting(request, now_s, facts.path, root)
        return False

    def ready(self, wait_s: float = 0.0) -> list[Ready]:
        """Requests whose adapters are on the host by now, or cannot be read, or come too late. wait_s: for one that is
        being read. Raises RanksLost."""
        if self._readings and wait_s:
            concurrent.futures.wait(self._readings.values(), wait_s, concurrent.futures.FIRST_COMPLETED)
        errors, now_s = dict[str, QuireError | None](), self._clock.now_s()
        for content_id, reading in list(self._readings.items()):
            if reading.done():
                del self._readings[content_id]
                errors[content_id] = self._outcome(content_id, reading)
        found, has_room = dict[str, Ready](), True
        for request_id, one in self._waiting.items():  # all are wanted until room is made for others
            content_id = one.request.content_id
            error = errors.get(content_id) or (self._too_late(one) if one.is_late(now_s) else None)
            if error is not None or self._want(content_id):
                found[request_id] = one.queued(now_s), error
            elif content_id not in self._readings and has_room:
                has_room = self._make_room()
                if has_room:
                    self._readings[content_id] = self._read(one.path, one.root)
        for request_id in found:
            del self._waiting[request_id]
        return list(found.values())

    def _too_late(self, one: Waiting) -> RequestExpired:
        limit_s, code = one.limit
        return RequestExpired(
            f"the adapter {shown(one.request.adapter)} did not come into the host's memory within {limit_s:g} s, which"
            f" the server allows: it keeps {self._max_kept} (--max-cpu-loras): try again later",
            code=code, param="model",
        )  # fmt: skip

    def drop(self, request_id: str) -> None:
        """It waits no longer; nothing happens if it does not."""
        self._waiting.pop(request_id, None)

    def note(self, stats: EngineStats, live: LiveSeqs) -> None:
        """What there is, and who has it, into a snapshot."""
        if not self._facts and not self._waiting:
            return
        names = {False: dict[str, None](), True: dict[str, None]()}
        for seqs in live.requests.values():
            for seq in seqs if seqs[0].request.adapter else ():
                if seq.state is not SeqState.ENDED:
                    names[seq.state is SeqState.RUNNING][seq.request.adapter] = None
        waiting = [one.request.adapter for one in self._waiting.values()]
        stats.adapters, stats.running_adapters = self.facts, list(names[True])
        stats.waiting_adapters = list(dict.fromkeys([*names[False], *waiting]))

    def close(self) -> None:
        """Nothing is read any more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- the host's memory ---------------------------------------------------------------------------------------

    def _want(self, content_id: str) -> bool:
        """Whether the host has it; it counts as used now."""
        if content_id not in self._kept:
            return False
        self._kept[content_id] = self._kept.pop(content_id)
        return True

    def _outcome(self, content_id: str, reading: Reading) -> QuireError | None:
        """Of one that was read again. Raises RanksLost, which ends the engine: its requests run again elsewhere."""
        try:
            found, _, weights = reading.result()
        except RanksLost:
            raise
        except QuireError as error:
            return RequestError(f"the adapter cannot be read again: {error.message}", param="model")
        except OSError as error:
            return RequestError(f"the adapter cannot be read again: {error.strerror}", param="model")
        self._keep(found, weights)
        if found != content_id:
            return RequestError("the adapter's folder has changed since it was loaded: load it again", param="model")
        return None

    def _make_room(self) -> bool:
        """For one more on the host; False if open requests have all."""
        while len(self._kept) + len(self._readings) + self._coming.total() >= self._max_kept:
            used = {*self._in_use(), *self._wanted()}
            oldest = next((content_id for content_id in self._kept if content_id not in used), None)
            if oldest is None:
                return False
            self._drop(oldest)
        return True

    def _trim(self) -> None:
        """Let go of what no name stands for, and no open request has."""
        named = {facts.content_id for facts in self._facts.values()}
        used = {*named, *self._in_use(), *self._wanted()}
        for content_id in [one for one in self._kept if one not in used]:
            self._drop(content_id)

    def _wanted(self) -> Iterable[str]:
        """Hashes of those that requests wait for."""
        return (one.request.content_id for one in self._waiting.values())

    def _keep(self, content_id: str, weights: Any) -> None:
        assert self._reader is not None
        self._reader.keep_adapter(content_id, weights)
        self._kept.pop(content_id, None)  # it is the newest now
        self._kept[content_id] = None

    def _drop(self, content_id: str) -> None:
        del self._kept[content_id]
        if self._reader is not None:
            self._reader.drop_adapter(content_id)

    def _read(self, path: str, root: str) -> Reading:
        assert self._reader is not None
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")
        return self._thread.submit(self._reader.read_adapter, path, root)


def registry_of(
    config: EngineConfig,
    reader: AdapterReader,
    scheduler: Scheduler,
    compiling: Callable[[], Iterable[Request]],
    *,
    is_restart: bool = False,
) -> AdapterRegistry:
    """With the adapters of --lora-modules. compiling: requests that wait for their grammars. is_restart: an engine
    before this one had them; one that cannot be read again is refused by name. Else it raises LoadError or
    ConfigError; RanksLost in any case."""

    def in_use() -> set[str]:
        live = (seqs[0].request for seqs in scheduler.live.requests.values())
        planned = (put.content_id for one in scheduler.in_flight for put in one.plan.adapters)
        return {*(request.content_id for request in (*live, *compiling())), *planned}

    registry = AdapterRegistry(reader, n_kept(config), in_use, scheduler.clock)
    for name, path in map(lora_module, config.lora_modules):
        try:
            facts = registry.load(name, path)
        except RanksLost:
            raise
        except (QuireError, OSError) as error:
            if not is_restart:
                raise
            reason = failure_words(error)
            logger.error("adapter %s is lost, requests that name it are refused: %s", name, reason)
            registry.miss(name, f"it could not be read when the engine was started again ({reason}): load it again")
        else:
            logger.info("adapter %s: rank %d, from %s", name, facts.rank, path)
    return registry


def failure_words(error: Exception) -> str:
    """Why an adapter could not be loaded, for whoever asked."""
    if isinstance(error, QuireError):
        return error.message
    return f"the adapter could not be read: {getattr(error, 'strerror', None) or type(error).__name__}"
