"""What an engine computes at the moment, in memory that outlives it: after its death it says who may be to blame.

Owns the memory's layout: two records of which one is valid, and the number of the last step. Does not own what follows
from it (`quarantine.py`). Invariants: at whatever instruction the engine dies, the memory holds a whole record, and it
names every request of the steps in flight; steps that only decode the same sequences cost one number.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence

import msgspec

from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq
from quire.core.events import Working
from quire.core.request import Request
from quire.engine.quarantine import fingerprint

MAX_WORKING = 16_384
"""Requests that a record names at most."""
RECORD_BYTES = 4 << 20
"""Room for so many; what was never written takes no memory."""
_VALID = struct.Struct("<I")
"""At the start: the record that is valid."""
_STEP = struct.Struct("<q")
_HEAD = struct.Struct("<Iq")
"""Before a record: its bytes, and the step at which it was written."""
_STEP_AT, _RECORDS_AT = 8, 16

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Working]).decode


def make_memory() -> int:
    """A descriptor of memory for one engine, to be inherited by it."""
    fd = os.memfd_create("quire-flight-recorder")
    os.ftruncate(fd, _RECORDS_AT + 2 * RECORD_BYTES)
    return fd


def read_memory(fd: int) -> list[Working]:
    """What the engine that has this memory was computing when it wrote last; empty if it never computed anything."""
    (valid,) = _VALID.unpack(os.pread(fd, _VALID.size, 0))
    (step,) = _STEP.unpack(os.pread(fd, _STEP.size, _STEP_AT))
    at = _RECORDS_AT + valid % 2 * RECORD_BYTES
    n_bytes, first_step = _HEAD.unpack(os.pread(fd, _HEAD.size, at))
    if not n_bytes:
        return []
    try:
        found = _decode(os.pread(fd, min(n_bytes, RECORD_BYTES), at + _HEAD.size))
    except msgspec.DecodeError:  # the engine has written over its own memory
        return []
    for working in found:
        if working.n_outputs:
            working.n_outputs += max(0, step - first_step)
    return found


class FlightRecorder:
    """The engine's end of the memory. Without memory (fd -1) it does nothing."""

    def __init__(self, fd: int, stage_of: Callable[[str], int]) -> None:
        """stage_of: `Working.stage` of a request id."""
        self._memory: mmap.mmap | None = None
        if fd >= 0:
            self._memory = mmap.mmap(fd, _RECORDS_AT + 2 * RECORD_BYTES)
            os.close(fd)
        self._stage_of = stage_of
        self._valid = 0
        self._marks: dict[str, bytes] = {}
        """Fingerprints of the requests in the record."""
        self._written: list[list[Seq]] = []
        """Sequences of the steps that the record names."""
        self._is_current = False

    def note_steps(self, in_flight: Sequence[PlanBuilder]) -> None:
        """To be called before the newest of these steps is computed."""
        if self._memory is None:
            return
        newest = in_flight[-1]
        seqs = [builder.seqs for builder in in_flight]
        is_decode = newest.plan.n_tokens == len(newest.seqs)
        if not is_decode or not self._is_current or seqs != self._written:
            self._write(self._memory, seqs, newest.step)
            self._is_current, self._written = is_decode, seqs
        _STEP.pack_into(self._memory, _STEP_AT, newest.step)

    def note_idle(self) -> None:
        """Nothing is computed."""
        if self._marks or self._written:
            self._written = []
            self._rewrite()

    def note_stages(self) -> None:
        """What `stage_of` says has changed."""
        if self._memory is not None:
            self._rewrite()

    def _rewrite(self) -> None:
        if self._memory is not None:
            (step,) = _STEP.unpack_from(self._memory, _STEP_AT)
            self._write(self._memory, self._written, step)
            self._is_current = False

    def _write(self, memory: mmap.mmap, steps: Sequence[Sequence[Seq]], step: int) -> None:
        working: dict[str, Working] = {}
        for seq in (seq for seqs in steps for seq in seqs):
            n_outputs = seq.planned - seq.prompt_len + 1 if seq.planned >= seq.prompt_len else 0
            found = working.get(seq.request.request_id)
            if found is None:
                working[seq.request.request_id] = self._entry(seq.request, n_outputs)
            elif n_outputs > found.n_outputs:
                found.n_outputs = n_outputs
        self._marks = {name: found.mark for name, found in working.items()}
        data = _encode(list(working.values())[:MAX_WORKING])
        self._valid = 1 - self._valid
        at = _RECORDS_AT + self._valid * RECORD_BYTES
        memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(memory, at, len(data), step)
        _VALID.pack_into(memory, 0, self._valid)

    def _entry(self, request: Request, n_outputs: int) -> Working:
        mark = self._marks.get(request.request_id)
        return Working(request.request_id, mark or fingerprint(request), n_outputs, self._stage_of(request.request_id))
