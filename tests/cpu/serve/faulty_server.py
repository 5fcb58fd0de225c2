"""`quire serve` in one process over the fake engine, which does what a prompt says: end the process, or be lost.

Run as `python faulty_server.py PORT FOLDER TRIAL_PAUSE_S`. Everything but the engine is real: signals, drain, store.
"""

from __future__ import annotations

import os
import signal
import sys

from serve_fakes import FakeEngine, byte_tokenizer, make_llm

from quire.core.commands import Command, Submit
from quire.engine.async_llm import AsyncLLM
from quire.serve.batch import worker as batch_worker
from quire.serve.config import ServerConfig
from quire.serve.server import Service, bind, run_service

POISON = "kill the process"
ENGINE_POISON = "kill the engine"


class FaultyEngine(FakeEngine):
    """Dies, as native code would, of a prompt that says so."""

    async def send(self, *commands: Command) -> None:
        for command in commands:
            if isinstance(command, Submit) and command.request.prompt_token_ids == self._poison:
                os.kill(os.getpid(), signal.SIGSEGV)
            if isinstance(command, Submit) and command.request.prompt_token_ids == self._engine_poison:
                self.die()
        await super().send(*commands)

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        self._poison = byte_tokenizer().encode(POISON)
        self._engine_poison = byte_tokenizer().encode(ENGINE_POISON)


async def load() -> AsyncLLM:
    return await make_llm(FaultyEngine(float(sys.argv[4])))


if __name__ == "__main__":
    batch_worker.TRIAL_PAUSE_S = float(sys.argv[3])
    batch_worker.POLL_S = 0.2
    config = ServerConfig(port=int(sys.argv[1]), data_dir=sys.argv[2], shutdown_timeout=5)
    config.verify()
    sys.exit(run_service(Service(config, bind(config), load)))
