"""`--record FILE`: traffic as JSON lines, one a request when it ends, to be repeated by `quire bench replay FILE`.

Owns the form of the lines and the file. Does not own what is repeated (`bench/replay.py`).
Invariants: without --record-prompts no content of a request is written: only lengths, and marks of equal beginnings
that say nothing without this process's secret; a disk that is full costs lines, never a request, and none waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import secrets
import threading
import time

import msgspec

from quire.core.errors import ConfigError
from quire.core.sampling import SamplingParams

logger = logging.getLogger("quire.serve")

MAX_QUEUED = 10_000
MARK_TOKENS = 32


class RecordedPrompt(msgspec.Struct, omit_defaults=True):
    """One prompt of a request."""

    length: int
    marks: list[int] = []
    """For each `MARK_TOKENS` tokens a number that stands for them and all before: equal beginnings, equal marks."""
    token_ids: list[int] | None = None
    """With --record-prompts."""


class RecordedRequest(msgspec.Struct, omit_defaults=True):
    """One line of the file."""

    at_s: float
    """Arrival, in seconds since 1970."""
    prompts: list[RecordedPrompt]
    n: int
    max_tokens: int | None
    """As asked for."""
    n_output: int
    """Tokens generated for all prompts and samples."""
    temperature: float
    seconds: float
    """Until it ended, or its client left."""
    is_complete: bool = True


class Recorder:
    """See the module. Without a path it does nothing. ConfigError if the file cannot be opened."""

    def __init__(self, path: str, with_prompts: bool) -> None:
        self.is_on = bool(path)
        self._with_prompts = with_prompts
        self._secret = secrets.token_bytes(16)
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_QUEUED)
        if not path:
            return
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None
        threading.Thread(target=self._write, daemon=True, name="quire-recorder").start()

    def note(
        self, prompts: list[list[int]], params: SamplingParams, n_output: int, seconds: float, *, is_complete: bool
    ) -> None:
        """A request has ended."""
        line = RecordedRequest(
            at_s=round(time.time() - seconds, 4), prompts=[self._prompt(prompt) for prompt in prompts], n=params.n,
            max_tokens=params.max_tokens, n_output=n_output, temperature=params.temperature,
            seconds=round(seconds, 4), is_complete=is_complete,
        )  # fmt: skip
        try:
            self._lines.put_nowait(msgspec.json.encode(line) + b"\n")
        except queue.Full:
            logger.error("the record of a request is lost: the disk is too slow")

    def _prompt(self, token_ids: list[int]) -> RecordedPrompt:
        if self._with_prompts:
            return RecordedPrompt(len(token_ids), token_ids=token_ids)
        digest, marks = hashlib.blake2b(key=self._secret, digest_size=4), []
        for start in range(0, len(token_ids) - MARK_TOKENS + 1, MARK_TOKENS):
            digest.update(msgspec.msgpack.encode(token_ids[start : start + MARK_TOKENS]))
            marks.append(int.from_bytes(digest.digest(), "little"))
        return RecordedPrompt(len(token_ids), marks)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            try:
                os.write(self._fd, line)
            except OSError as error:
                logger.error("the record of a request is lost: %s", error.strerror)
