"""The ranks that a replica has on another machine: the process that holds them. Runs inside an actor; knows nothing of
Ray.

Owns the process, which ends with this one, and is started again while the replica lives. Does not own what it does
(`engine/ranks/node.py`), nor how often its engine may be lost (`supervisor.py`).
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
from typing import Final

import msgspec

from quire.config.engine import EngineConfig
from quire.core.interpreter import python
from quire.engine.child import status_text

logger = logging.getLogger("quire.engine")

NODE_COMMAND: Final = ("-m", "quire.engine.ranks.node")


class OtherNode:
    """`quire serve --headless` without a command line."""

    def __init__(self, config: EngineConfig) -> None:
        """config: with the address and port of node 0. OSError: there is no room for a process."""
        self._config = config
        self._start()

    def check(self) -> None:
        """Start it again if it has ended: the replica's engine waits for it."""
        code = self._process.poll()
        if code is not None:
            name = f"node {self._config.node_rank} of the replica"
            logger.error("%s ended with %s; starting it again", name, status_text(code))
            self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            python(*NODE_COMMAND), stdin=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which `check` sees
            self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
            self._process.stdin.flush()
