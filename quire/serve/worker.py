"""One API process of several: `python -m quire.serve.worker`, started by `serve/fleet.py`.

Owns its end with its parent. Does not own the engine: it shares the one that the parent supervises.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec

from quire.core.errors import ConfigError
from quire.engine.async_llm import AsyncLLM
from quire.serve.fleet import EXIT_BAD_OPTIONS, WorkerStart
from quire.serve.server import Service, bind, fail, prepare_process, run_service


def end_with_parent() -> None:
    """Leave at once when the parent's end of standard input closes, however it died."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="quire-parent-watch").start()


def main() -> int:
    """Entry point of the process."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerStart)
    end_with_parent()
    prepare_process()
    try:
        listener = bind(start.server, shared=True)
    except ConfigError as error:
        return fail(error, EXIT_BAD_OPTIONS)
    service = Service(
        start.server, listener, lambda: AsyncLLM.connect(start.engine, start.address, start.index), is_worker=True
    )
    service.state.metrics.share(start.folder, start.index)
    return run_service(service)


if __name__ == "__main__":
    sys.exit(main())
