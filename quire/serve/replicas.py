"""`quire serve --replicas N` and `quire cluster`: one server over several engines, which Ray Serve holds.

Owns the order of start and end, and what SIGHUP leads to. Does not own the server (`server.py`) nor the replicas
(`engine/replicas`). Invariants as in `server.py`; a Ray that was started here ends with the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable

from quire.config.cluster import ClusterConfig
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, QuireError
from quire.engine.replicas.cluster import Cluster
from quire.serve.api_processes import EXIT_BAD_OPTIONS
from quire.serve.config import ServerConfig
from quire.serve.http.keys import KeyRing
from quire.serve.server import Service, bind, fail, prepare_process, run_service

logger = logging.getLogger("quire.serve")

Reread = Callable[[], tuple[EngineConfig, ClusterConfig]]


def run(engine: EngineConfig, server: ServerConfig, options: ClusterConfig, reread: Reread | None = None) -> int:
    """Serve until a signal; returns the exit code. reread: the options as they are to be after SIGHUP."""
    try:
        prepare_process()
        engine.verify()
        server.verify()
        options.verify()
        if server.api_processes > 1:
            raise ConfigError(
                f"api_processes = {server.api_processes} does not go together with replicas yet: leave it out"
            )
        KeyRing(server.api_key, server.api_key_file)
        listener = bind(server)
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    cluster = Cluster(f"quire-{socket.gethostname()}-{listener.getsockname()[1]}", engine, options)
    try:
        # In this thread, the main one: a Ray that is started ends with the thread that has started it.
        cluster.connect()
        return run_service(Service(server, listener, cluster.load, on_reload=_Updates(cluster, reread).begin))
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    finally:
        print("Quire ends the replicas.", file=sys.stderr, flush=True)
        cluster.close()


class _Updates:
    """Rolling updates, one at a time."""

    def __init__(self, cluster: Cluster, reread: Reread | None) -> None:
        self._cluster = cluster
        self._reread = reread
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Replace the replicas, unless that is under way."""
        if self._task is not None and not self._task.done():
            logger.error("SIGHUP: the replicas are still being replaced: send it again after that")
        else:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            logger.info("SIGHUP: the replicas are replaced, some at a time")
            await self._cluster.update(*(self._reread() if self._reread is not None else (None, None)))
            logger.info("the replicas are replaced")
        except QuireError as error:
            logger.error("the replicas are not replaced: %s", error.message)
