"""Results on their way from another rank to rank 0, through a ring of their own: from the last stage of a pipeline, or
from a data-parallel rank.

Owns both ends. Does not own the ring (`ring.py`) nor what a result says. Invariant: who says results does not wait for
a result's device before it launches the next step: a thread does.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from quire.core.result import StepResult
from quire.engine.ranks.ring import RankMemory, RingReader, RingWriter

N_ENDS: Final = 2
"""Of the memory of this ring: who writes, and who reads."""
READER: Final = 1
RESULT, LOADS = b"R", b"L"
"""First byte of a message."""
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(StepResult)
_loads_decoder: Final = msgspec.msgpack.Decoder(list[list[int]])


class Launched(Protocol):
    """A step with its masks."""

    def result(self) -> StepResult:
        """Waits for the device."""
        ...


class ResultWriter:
    """The end of the rank that says them."""

    def __init__(self, fd: int, bell: int, fail: Callable[[Exception], None]) -> None:
        """fail: told in the thread what went wrong in it: the rank cannot go on."""
        self._ring = RingWriter(RankMemory(fd, N_ENDS), [bell], check=lambda: None)
        self._fail = fail
        self._steps: queue.SimpleQueue[Launched | list[list[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="quire-results").start()

    def put(self, step: Launched) -> None:
        """Say what came of it, when it has come and all before it is said."""
        self._steps.put(step)

    def put_loads(self, loads: list[list[int]]) -> None:
        """Say how many tokens chose each expert, behind the steps that were put before."""
        self._steps.put(loads)

    def _run(self) -> None:
        try:
            while True:
                said = self._steps.get()
                if isinstance(said, list):
                    self._ring.put(LOADS + _encoder.encode(said))
                else:
                    self._ring.put(RESULT + _encoder.encode(said.result()))
        except Exception as error:
            self._fail(error)


class ResultReader:
    """Rank 0's end."""

    def __init__(self, fd: int, bell: int, check: Callable[[], None]) -> None:
        """bell: is closed with this. check: raises when nobody writes any more."""
        weakref.finalize(self, os.close, bell)
        self._ring = RingReader(RankMemory(fd, N_ENDS), READER, bell, check)
        self._found: dict[int, StepResult] = {}
        """Of steps that nobody has asked for yet."""
        self._loads: collections.deque[list[list[int]]] = collections.deque()

    def has(self, step: int) -> bool:
        """Whether its result is there."""
        while step not in self._found and self._ring.has_more(0.0):
            self._read()
        return step in self._found

    def wait(self, step: int, timeout_s: float | None) -> None:
        """Returns when its result is there. TimeoutError, or what `check` raises."""
        while step not in self._found:
            if not self._ring.has_more(timeout_s):
                raise TimeoutError
            self._read()

    def take(self, step: int) -> StepResult:
        """Its result, which is there, once."""
        return self._found.pop(step)

    def has_loads(self, timeout_s: float) -> bool:
        """Whether loads that were put are there, or come in time. Raises what `check` raises."""
        while not self._loads and self._ring.has_more(timeout_s):
            self._read()
        return bool(self._loads)

    def take_loads(self) -> list[list[int]]:
        """The next loads, which are there."""
        return self._loads.popleft()

    def _read(self) -> None:
        said = memoryview(self._ring.get())
        if said[:1] == LOADS:
            self._loads.append(_loads_decoder.decode(said[1:]))
            return
        result = _decoder.decode(said[1:])
        self._found[result.step] = result
