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
from quire.core.files import open_output
from quire.core.sampling import SamplingParams

logger = logging.getLogger("quire.serve")

MAX_QUEUED = 10_000
MAX_WAITING_TOKENS = 50_000_000
"""Of the prompts of requests that are not written yet, which stay in memory."""
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
        self._notes: queue.SimpleQueue[tuple[RecordedRequest, list[list[int]]] | None] = queue.SimpleQueue()
        """Lines without their prompts, and these; None: only look at the file."""
        self._n_waiting_tokens = 0
        self._counting = threading.Lock()
        self._path = path
        self._is_moved = threading.Event()
        """The file is to be opened again."""
        if not path:
            return
        self._fd = self._open()
        threading.Thread(target=self._write, daemon=True, name="quire-recorder").start()

    def note(
        self, prompts: list[list[int]], params: SamplingParams, n_output: int, seconds: float, *, is_complete: bool
    ) -> None:
        """A request has ended."""
        line = RecordedRequest(
            at_s=round(time.time() - seconds, 4), prompts=[], n=params.n, max_tokens=params.max_tokens,
            n_output=n_output, temperature=params.temperature, seconds=round(seconds, 4), is_complete=is_complete,
        )  # fmt: skip
        n_tokens = sum(map(len, prompts))
        if self._notes.qsize() >= MAX_QUEUED or self._n_waiting_tokens + n_tokens > MAX_WAITING_TOKENS:
            logger.error("the record of a request is lost: the disk is too slow")
            return
        with self._counting:
            self._n_waiting_tokens += n_tokens
        self._notes.put((line, prompts))

    def reopen(self) -> None:
        """What comes goes to the file that has the path by then: the old one may have been moved away (logrotate)."""
        if self.is_on:
            self._is_moved.set()
            self._notes.put(None)

    def _open(self) -> int:
        try:
            return open_output(self._path, os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {self._path} cannot be written: {error.strerror}") from None

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
            note = self._notes.get()
            if self._is_moved.is_set():
                self._is_moved.clear()
                try:
                    fd = self._open()
                    os.close(self._fd)
                    self._fd = fd
                except ConfigError as error:
                    logger.error("the record goes on in the old file: %s", error)
            if note is None:
                continue
            line, prompts = note
            line.prompts = [self._prompt(prompt) for prompt in prompts]
            try:
                os.write(self._fd, msgspec.json.encode(line) + b"\n")
            except OSError as error:
                logger.error("the record of a request is lost: %s", error.strerror)
            with self._counting:
                self._n_waiting_tokens -= sum(map(len, prompts))
