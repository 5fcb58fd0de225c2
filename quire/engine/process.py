"""The engine process: reads commands from its clients, steps while there is work, sends one message a step to each.

Run as `python -m quire.engine.process` by `engine/supervisor.py`. Ends when told to, or when its parent is gone
(end of file on standard input), or with EngineFailed and exit status 1 when steps keep failing. SIGUSR1 writes the
stacks of all threads to the log; SIGINT, SIGTERM and SIGHUP are for the parent, also when they are sent to all its
processes. Owns no policy.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from quire.compute.weights.hub import called, find_checkpoint, is_on_hub
from quire.config.engine import EngineConfig
from quire.core.commands import (
    Cancel,
    CancelSeq,
    Command,
    Explain,
    FollowPrefixes,
    LoadAdapter,
    Order,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from quire.core.errors import ConfigError, EngineError, QuireError, RequestError, about
from quire.core.events import (
    Done,
    EndKind,
    EngineFailed,
    EngineReady,
    EngineStats,
    Explained,
    Fetching,
    Heartbeat,
    SeqDelta,
    StepOutputs,
)
from quire.core.shortage import shortage
from quire.engine import logs, stdio
from quire.engine.adapters import Loading, failure_words
from quire.engine.child import read_start
from quire.engine.command_reader import refusals
from quire.engine.core import EngineCore
from quire.engine.executors.executor import RanksLost
from quire.engine.flight_recorder import FlightRecorder
from quire.engine.garbage import no_gc, quiet_gc, thawed
from quire.engine.prefix_updates import PrefixPublisher
from quire.engine.router import ClientRouter
from quire.engine.status_pipe import StatusPipe
from quire.engine.throughput import ThroughputLog
from quire.engine.trials import Trials
from quire.engine.wire import SHUTDOWN_LINE, ProcessStart, encode

logger = logging.getLogger("quire.engine")

STATS_PERIOD_S = 0.25
MAP_PERIOD_S = 1.0
"""The page map is read less often: it walks every page held."""
IDLE_PERIOD_S = 0.5
LOADING_PERIOD_S = 0.01
"""So often an engine with nothing else to do looks whether an adapter is read."""

Build = Callable[..., tuple[EngineCore, EngineReady]]


class EngineLoop:
    """Couples one router to one `EngineCore`."""

    def __init__(
        self,
        core: EngineCore,
        router: ClientRouter,
        status: StatusPipe,
        *,
        log_stats: bool,
        start: ProcessStart | None = None,
    ) -> None:
        """start: as the supervisor wrote it, for what is known of the engines before."""
        self._core = core
        self._core.on_wait = self._send_stats
        if core.ranks is not None:
            core.ranks.on_late = self._tell_late
        self._router = router
        self._prefixes = PrefixPublisher(core.scheduler, router.tell)
        self._status = status
        self._next_stats_s = self._next_map_s = 0.0
        self._stats: EngineStats | None = None
        """As they were told last."""
        self._thread = threading.get_ident()
        now_s = time.monotonic()
        self._throughput = ThroughputLog(now_s) if log_stats else None
        left, ends = (start.n_restarts_left, start.ends) if start is not None else (0, [])
        self._trials = Trials(left, now_s, after_death=bool(ends and ends[-1].working))
        self._recorder = FlightRecorder(start.recorder_fd if start is not None else -1, self._trials.stage_of)
        self._core.on_plan = self._recorder.note_steps
        self._lora_root = "" if start is None else start.config.lora_root
        self._loading: dict[int, Loading] = {}
        """Ticket → the adapter that is being read."""
        self.closing = False

    def run(self) -> None:
        """Serve until a Shutdown arrives. EngineError when the core gives up; every open request was answered then.
        RanksLost: none was."""
        while not self.closing:
            deltas = self._take_commands()
            if self._loading:
                self._finish_loading()
            orphans = self._router.take_orphans()
            if orphans:
                self._cancel(Cancel(orphans))
            for submit in self._trials.due(time.monotonic()):
                deltas += self._submit(submit)
            if self._core.has_work():
                deltas += self._core.step()
            else:
                self._recorder.note_idle()
            if deltas:
                self._trials.note(deltas)
                self._router.deliver(deltas)
            self._send_stats()
            self._core.check()
        with thawed():
            self._core.shutdown()

    def _take_commands(self) -> list[SeqDelta]:
        if self._loading and not self._core.has_work():
            timeout_s = LOADING_PERIOD_S
        else:
            timeout_s = 0.0 if self._core.has_work() else self._trials.wait_s(IDLE_PERIOD_S, time.monotonic())
        refused: list[SeqDelta] = []
        while True:
            received = self._router.receive(timeout_s)
            if received is None:
                return refused
            commands, unread = received
            refused += unread
            for command in commands:
                refused += self._handle(command)
            timeout_s = 0.0

    def _handle(self, command: Command) -> list[SeqDelta]:
        """Submissions and cancellations are the core's, the rest is known here alone. Returns ends of those refused."""
        match command:
            case Shutdown():
                self.closing = True
            case Explain():
                found = self._core.scheduler.history.explain(command.label)
                self._router.answer(Explained(command.ticket, found))
            case FollowPrefixes(ticket):
                self._prefixes.follow(ticket)
            case ResetPrefixCache() | Sleep() | WakeUp() | UnloadAdapter():
                self._router.answer(self._carry_out(command))
            case LoadAdapter():
                self._begin_loading(command)
            case Submit():
                return self._submit(command) if self._trials.take(command, time.monotonic()) else []
            case Cancel():
                self._cancel(command)
            case CancelSeq(request_id, index):
                self._core.handle(command)
                self._trials.drop_seq(request_id, index)
        return []

    def _carry_out(self, order: Order) -> Done:
        """The news of it goes to every client before the answer goes to one."""
        value, error, param = True, None, None
        try:
            match order:
                case ResetPrefixCache():
                    value = self._core.scheduler.forget_prefixes()
                case Sleep():
                    with thawed():
                        self._core.sleep(order.level)
                case WakeUp():
                    self._core.wake_up()
                case UnloadAdapter():
                    self._core.adapters.unload(order.name)
        except RanksLost:
            raise
        except (EngineError, RequestError) as failure:
            error, param = failure.message, failure.param
        self._next_stats_s = 0.0
        self._send_stats()
        return Done(order.ticket, value, error, param)

    def _begin_loading(self, order: LoadAdapter) -> None:
        """The loop goes on while it is read."""
        try:
            if not self._lora_root:
                raise ConfigError("adapters are loaded from inside the folder of --lora-root, which is not set")
            loading = self._core.adapters.begin(order.name, order.path, self._lora_root, in_place=order.in_place)
        except RanksLost:
            raise
        except QuireError as error:
            self._router.answer(Done(order.ticket, False, error.message, error.param))
        else:
            self._loading[order.ticket] = loading

    def _finish_loading(self) -> None:
        """Answer for the adapters that are read; every client hears of them before."""
        for ticket, loading in list(self._loading.items()):
            if loading.reading.done():
                del self._loading[ticket]
                self._router.answer(self._loaded(ticket, loading))

    def _loaded(self, ticket: int, loading: Loading) -> Done:
        try:
            self._core.adapters.finish(loading)
        except RanksLost:
            raise
        except (QuireError, OSError, MemoryError) as error:
            return Done(ticket, False, failure_words(error))
        self._next_stats_s = 0.0
        self._send_stats()
        return Done(ticket)

    def _submit(self, submit: Submit) -> list[SeqDelta]:
        try:
            self._core.handle(submit)
        except QuireError as error:
            return refusals(submit.request, error)
        return []

    def _cancel(self, command: Cancel) -> None:
        self._core.handle(command)
        self._trials.drop(command.request_ids)

    def _send_stats(self) -> None:
        """A snapshot if one is due; also called while the loop waits for a long step, lest it be thought dead."""
        now_s = time.monotonic()
        if now_s < self._next_stats_s:
            return
        self._next_stats_s = now_s + STATS_PERIOD_S
        with_map = now_s >= self._next_map_s
        stats = self._core.stats(with_map=with_map)
        if with_map:
            self._next_map_s = now_s + MAP_PERIOD_S
        elif self._stats is not None:
            stats.page_map, stats.tree = self._stats.page_map, self._stats.tree
        stats.n_waiting += self._trials.n_waiting
        self._stats = stats
        self._router.broadcast(StepOutputs([], stats))
        self._prefixes.send()
        self._status.say(Heartbeat(stats.last_step_age_s, stats.steps_in_flight))
        if self._throughput is not None:
            self._throughput.note(stats, now_s)

    def _tell_late(self) -> None:
        """A rank is late, and this thread, or one that wakes the engine beside it, waits for the device: which is asked
        for nothing, not even for figures."""
        now_s = time.monotonic()
        if self._stats is None or now_s < self._next_stats_s or threading.get_ident() != self._thread:
            return
        self._next_stats_s = now_s + STATS_PERIOD_S
        self._router.broadcast(StepOutputs([], msgspec.structs.replace(self._stats, is_late=True)))


def follow_parent(address: str, unread: bytes) -> None:
    """Leave when the parent says so; leave at once, with the socket's folder, when it is gone, however it died.

    unread: what it has said after the first line and was read with that.
    """

    def wait() -> None:
        data = unread
        while True:
            if SHUTDOWN_LINE in data:
                end: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
                with end as socket:
                    socket.connect(address)
                    socket.send(encode([Shutdown()]))
            # The descriptor, not the buffered file: its lock would still be held when the interpreter shuts down.
            data = os.read(0, 4096)
            if not data:
                break
        shutil.rmtree(folder_of(address), ignore_errors=True)
        if os.getpgrp() == os.getpid():  # with a rank that was stopped before it could have noticed
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()


def folder_of(address: str) -> pathlib.Path:
    """Of the socket that is there."""
    return pathlib.Path(address.removeprefix("ipc://")).parent


def fetch(config: EngineConfig, status: StatusPipe) -> EngineConfig:
    """The same options with folders in the place of hub names. The parent is told how long that takes: its limit on
    loading does not hold meanwhile. Raises LoadError or ConfigError."""
    if not is_on_hub(config.model) and not is_on_hub(config.tokenizer):
        return config
    status.say(Fetching(is_over=False))
    model = str(find_checkpoint(config.model, config.revision, config.download_dir))
    tokenizer = ""
    if config.tokenizer:
        with about("tokenizer", config.tokenizer):
            tokenizer = str(find_checkpoint(config.tokenizer, config.revision, config.download_dir))
    status.say(Fetching(is_over=True))
    return msgspec.structs.replace(config, model=model, tokenizer=tokenizer, revision="")


def serve(start: ProcessStart, socket: zmq.Socket[bytes], status: StatusPipe, build: Build | None) -> int:
    """Build the engine and run its loop; returns the exit status."""
    config = start.config
    try:
        if build is None:  # torch is imported here and not above: nothing must take long before signals are dealt with
            logger.info("loading torch")
            with no_gc():
                build_engine = importlib.import_module("quire.engine.build").build_engine
            build = functools.partial(build_engine, place=folder_of(start.address))  # which is removed with the socket
            logger.info("torch is loaded; loading %s", called(config.model))
        core, ready = build(fetch(config, status), is_server=True, is_restart=bool(start.ends))
    except RanksLost as loss:
        status.say(EngineFailed(loss.message, loss.kind))
        return 1
    except QuireError as error:
        kind = EndKind.FAILED if isinstance(error, EngineError) else EndKind.REFUSED
        status.say(EngineFailed(error.message, kind))
        return 1
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        reason = shortage(error)
        if reason is None:
            raise
        status.say(EngineFailed(f"the engine could not be loaded: {reason}"))
        return 1
    if core.ranks is not None:
        core.ranks.on_loss = functools.partial(_leave, status)
    ready = msgspec.structs.replace(ready, engine=start.engine, ends=start.ends)
    router = ClientRouter(socket, ready)
    status.say(ready)
    quiet_gc()
    try:
        EngineLoop(core, router, status, log_stats=not config.disable_log_stats, start=start).run()
    except RanksLost as loss:
        status.say(EngineFailed(loss.message, loss.kind))
        if core.ranks is not None:
            core.ranks.wait_ended()
        return 1
    except EngineError as error:
        logger.error("the engine gives up: %s", error.message)
        status.say(EngineFailed(error.message))
        return 1
    except Exception:
        logger.exception("the engine loop ended")
        status.say(EngineFailed("the engine failed; see its log", EndKind.CRASH))
        return 1
    finally:
        router.close()
    return 0


def _leave(status: StatusPipe, loss: RanksLost) -> None:
    """A rank is lost, and rank 0 may stand still in the middle of a step: this process ends at once."""
    status.say(EngineFailed(loss.message, loss.kind))
    stdio.drain()
    os._exit(1)


def main(build: Build | None = None) -> int:
    """Entry point of the process. build: what makes the engine, for tests; None: `build_engine`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.set_up()
    line, unread = read_start()
    start = msgspec.json.decode(line, type=ProcessStart)
    follow_parent(start.address, unread)
    return serve(start, ClientRouter.bind(start.address), StatusPipe(start.status_fd), build)


if __name__ == "__main__":
    sys.exit(main())
