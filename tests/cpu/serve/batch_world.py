"""Files and batches without a server: the real endpoints, store and worker on a loop whose time is virtual.

Everything is deterministic: work on the disk is done at once, between pauses of a random number of turns of the loop,
so that what runs side by side is mixed in every way. A crash drops everything that is not on the disk.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import pathlib
import random
import sqlite3
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from quire.serve.batch import attempt as batch_attempt
from quire.serve.batch import batches, files
from quire.serve.batch import end as batch_end
from quire.serve.batch import locks as batch_locks
from quire.serve.batch import outputs as batch_outputs
from quire.serve.batch import scan as batch_scan
from quire.serve.batch import schema as batch_schema
from quire.serve.batch import store as batch_store
from quire.serve.batch import worker as batch_worker
from quire.serve.batch.space import SpaceLimits
from quire.serve.batch.store import BatchStore, StoreThread
from quire.serve.batch.worker import BatchWorker
from quire.serve.config import ServerConfig
from quire.serve.http.exchange import ClientGone, Exchange
from quire.serve.http.keys import Tenant
from quire.serve.http.refusal import Refusal, bad_request, unavailable

EPOCH_S = 1_800_000_000
SMALL = [
    (batch_outputs, "PIECE_BYTES", 700), (batch_outputs, "PIECE_ROWS", 3), (batch_scan, "SOME_LINES", 3),
    (batch_scan, "READ_BYTES", 64), (batch_attempt, "DROP_LINES", 3), (batch_end, "DROP_LINES", 3),
    (batch_end, "FILL_LINES", 2), (files, "WRITE_BYTES", 150), (batch_worker, "MAX_RUNNING_BYTES", 400),
]  # fmt: skip
"""Limits made so small that everything takes several steps."""


class Stuck(Exception):
    """Nothing is left that could ever happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that does not wait: its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            if timeout is None:
                raise Stuck
            self.now_s += max(0.0, timeout)
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


class InlineStore(StoreThread):
    """Does its work in the loop's own thread, at a random turn."""

    def __init__(self, store: BatchStore, chance: random.Random) -> None:
        super().__init__(store)
        self._pool.shutdown()
        self._chance = chance
        self.is_dead = False
        self.n_refusals = 0
        """So many more times the disk refuses."""
        self.n_unreadable = 0
        """So many more times a content cannot be read or written."""
        self.n_until_death = -1
        """So many more times the disk is looked at, until the process dies."""

    async def run(self, work: Callable[[BatchStore], Any]) -> Any:
        await self._pause()
        if self.n_refusals:
            self.n_refusals -= 1
            raise sqlite3.OperationalError("database or disk is full")
        result = self.store.transact(work)
        await self._pause()
        return result

    async def aside(self, work: Callable[[], Any]) -> Any:
        await self._pause()
        result = work()
        await self._pause()
        return result

    def close(self) -> None:
        self._close()
        self.is_dead = True

    def kill(self) -> None:
        """What the kernel does to a process that ended."""
        self.is_dead = True
        holder = self.store.space._holder
        if holder is not None:
            holder._lock.release()
        self.store._database.close()

    async def _pause(self) -> None:
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0)
        self.n_until_death -= 1
        if self.is_dead or self.n_until_death == 0:
            self.is_dead = True
            raise asyncio.CancelledError


class FakeState:
    """What endpoints and worker need of `ServerState`."""

    def __init__(self, config: ServerConfig, store: InlineStore) -> None:
        self.config = config
        self.store = store
        self.draining = False
        self.batch_news = asyncio.Event()
        self.keys = types.SimpleNamespace(named=Tenant)
        self.large_work_lock = types.SimpleNamespace(of=lambda size: contextlib.nullcontext())
        self.llm = types.SimpleNamespace(
            ready=types.SimpleNamespace(max_num_seqs=6),
            n_open=0,
            stats=lambda: types.SimpleNamespace(n_waiting=0),
            healthy=lambda: True,
        )

    def check_open(self) -> None:
        if self.draining:
            raise unavailable("draining", "The server is shutting down.")

    async def read(self, exchange: Exchange, decoder: Any) -> Any:
        return decoder.decode(await exchange.read_body(1 << 20, 60, lambda n_bytes: None), exchange.ignored)

    def note_ignored(self, ignored: Any) -> None:
        """Nothing of it is unknown here."""
        assert not ignored.n


class World:
    """One data folder, and the server that is up on it."""

    def __init__(self, folder: pathlib.Path, seed: int, *, whole: int, owner: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.loop = VirtualLoop()
        self.config = ServerConfig(
            data_dir=str(folder), max_data_bytes=whole, max_data_bytes_per_key=owner, max_file_bytes=2000,
            batch_concurrency=4, max_body_bytes=1024,
        )  # fmt: skip
        self.jumped_s = 0
        """How far the wall clock is ahead."""
        self.busy: dict[str, int] = {}
        """custom_id → so many times more the server is busy for it."""
        self.in_flight: dict[Exchange, int] = {}
        """Lines that are being answered → their bytes."""
        self.n_crashes = 0
        self.trials: collections.Counter[str] = collections.Counter()
        """Batch → deaths of processes while one of its lines was on trial."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._undo = contextlib.ExitStack()
        clock = types.SimpleNamespace(time=lambda: EPOCH_S + self.loop.now_s + self.jumped_s)
        for module in (batches, files, batch_store, batch_outputs):
            self._undo.enter_context(_patched(module, "time", clock))
        names = types.SimpleNamespace(token_hex=lambda n: self.chance.randbytes(n).hex())
        for module in (batch_schema, batch_locks):
            self._undo.enter_context(_patched(module, "secrets", names))
        for module, name, value in SMALL:
            self._undo.enter_context(_patched(module, name, value))
        for module, name in ((batch_scan, "opened"), (batch_end, "append"), (files, "_append"), (files, "_opened")):
            self._undo.enter_context(_patched(module, name, self._refusing(getattr(module, name))))
        self.start()

    def _refusing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Something that is done to a content."""

        def work(*args: Any) -> Any:
            if self.store.n_unreadable:
                self.store.n_unreadable -= 1
                raise OSError(5, "Input/output error")
            return real(*args)

        return work

    # ---- the process

    def start(self) -> None:
        limits = SpaceLimits(self.config.max_data_bytes, self.config.max_data_bytes_per_key)
        self.store = InlineStore(BatchStore(self.folder, limits), self.chance)
        self.state = FakeState(self.config, self.store)
        self.runner = BatchWorker(self.state, self.answer, self.store)  # type: ignore[arg-type]
        self.worker = self.loop.create_task(self.runner.run())

    def crash(self) -> None:
        """SIGKILL, and a start."""
        self.n_crashes += 1
        self._kill()
        self._end()
        with contextlib.closing(sqlite3.connect(self.folder / "quire.sqlite3")) as database:
            self.trials.update(row[0] for row in database.execute("select batch_id from lines where state = 3"))
        self.start()

    def restart(self) -> None:
        """SIGTERM, and a start."""
        self.state.draining = True
        n_crashes = self.n_crashes
        self.turns(self.chance.randrange(30))
        if n_crashes == self.n_crashes:
            self.worker.cancel()
            self.store.close()
            self._end()
            with contextlib.closing(sqlite3.connect(self.folder / "quire.sqlite3")) as database:
                marks = database.execute("select * from lines where state in (1, 3)").fetchall()
            assert not marks or self.store.at_close is None, "a stop in order makes suspects"
            self.start()

    def close(self) -> None:
        self._kill()
        self._end()
        self.loop.close()
        self._undo.close()

    def _kill(self) -> None:
        self.store.kill()
        if self.runner._lock is not None:
            self.runner._lock.release()

    def _end(self) -> None:
        tasks = sorted(asyncio.all_tasks(self.loop), key=lambda task: int(task.get_name().rpartition("-")[2]))
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.in_flight.clear()
        self.tasks.clear()

    # ---- time

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let something happen beside everything else."""
        task = self.loop.create_task(work)
        self.tasks.add(task)

    def turns(self, n: int) -> None:
        """So many turns of the loop, in which no time passes."""

        async def some() -> None:
            for _ in range(n):
                await asyncio.sleep(0)
                if self.store.is_dead:
                    return

        self._run(some())

    def wait(self, seconds: float) -> None:
        """So much time, in which everything goes on."""

        async def some() -> None:
            end_s = self.loop.now_s + seconds
            while self.loop.now_s < end_s and not self.store.is_dead:
                await asyncio.sleep(min(0.5, end_s - self.loop.now_s))

        self._run(some())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.discard(task)
            if not task.cancelled():
                task.result()
        if self.store.is_dead:
            self.crash()
        if self.worker.done():
            self.worker.result()  # what it has raised
            raise AssertionError("the worker has left")

    # ---- requests

    async def answer(self, exchange: Exchange) -> None:
        """Takes the place of the endpoints that lines are for."""
        body = json.loads(await exchange.read_body(1 << 20, 60, lambda n_bytes: None))
        name, kind = body["name"], body["kind"]
        assert name.split("/")[0] == exchange.tenant.name, "a line of another tenant"
        self.in_flight[exchange] = exchange.body_bytes
        try:
            await self._answer(exchange, body, name, kind)
        finally:
            del self.in_flight[exchange]

    async def _answer(self, exchange: Exchange, body: dict[str, Any], name: str, kind: str) -> None:
        n_bytes = sum(self.in_flight.values())
        assert len(self.in_flight) <= self.config.batch_concurrency, "too many lines at once"
        assert n_bytes <= batch_worker.MAX_RUNNING_BYTES or len(self.in_flight) == 1, "too many bytes at once"
        for _ in range(self.chance.randrange(6)):
            await asyncio.sleep(0)
        await asyncio.sleep(self.chance.choice([0, 0, 0.3, 3, 15]))
        if kind == "poison":
            self.store.is_dead = True
            await asyncio.sleep(1e9)
        if self.busy.get(name):
            self.busy[name] -= 1
            code = "rate_limit_exceeded" if len(name) % 2 else "overloaded"
            await exchange.refuse(Refusal(429, "busy", code=code, retry_after_s=2))
        elif kind == "bad":
            await exchange.refuse(bad_request("bad", "name"))
        elif kind == "raise":
            raise RuntimeError("a bug")
        elif kind == "cut":
            await exchange.start(200, b"application/json", [], 100)
            await exchange.refuse(bad_request("too late"))
        else:
            await exchange.respond_json({"echo": name, "filler": "x" * body["n_filler"]})

    async def ask(
        self, owner: str, handler: Callable[..., Any], body: list[bytes], headers: dict[str, str], **params: str
    ) -> tuple[int, bytes]:
        """(status, body) of a request to an endpoint of files or batches; status 0: the client left, 507: the server
        cannot, also for other reasons than its disk."""
        parts = list(body)
        status, found = 0, []

        async def receive() -> Any:
            for _ in range(self.chance.randrange(3)):
                await asyncio.sleep(0)
            if not parts:
                return {"type": "http.disconnect"}
            data = parts.pop(0)
            return {"type": "http.request", "body": data, "more_body": bool(parts) or data == b"CUT"}

        async def send(message: Any) -> None:
            nonlocal status
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                found.append(message.get("body", b""))

        scope = {
            "type": "http", "method": "POST", "raw_path": b"/v1/x", "path": "/v1/x", "path_params": params,
            "query_string": b"", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        exchange = Exchange(scope, receive, send)
        exchange.tenant = Tenant(owner)
        try:
            await handler(self.state, exchange)
        except Refusal as refusal:
            assert not exchange.started, refusal
            return 507 if refusal.status == 503 else refusal.status, refusal.body()
        except ClientGone:
            return 0, b""
        except OSError:  # as the application has it: what has begun is cut off
            return 0 if exchange.started else 500, b""
        return status, b"".join(found)


@contextlib.contextmanager
def _patched(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
