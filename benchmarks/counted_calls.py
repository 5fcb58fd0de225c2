"""What a rank says to others, counted at its `Comm` while an engine runs: calls, and bytes that it sends.

Owns the counting of this process, which has rank 0. Bytes of an all-reduce and of a reduce-scatter are a ring's, which
are the least; `wire_bytes` is what gloo really sent. Captured steps do not speak through `Comm` again: take
enforce_eager.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from quire.compute.dist.comm import Reduction
from quire.compute.dist.gloo import GlooComm
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm

BYTES_ACKED: Final = 120
"""Where tcp_info of Linux has the number of bytes that the other end has acknowledged, uint64."""


def _whole(comm: Any, x: torch.Tensor, *_: Any) -> int:
    return x.nbytes


def _all_to_all(comm: Any, x: torch.Tensor, sent: list[int], _: list[int]) -> int:
    return x[0].nbytes * (sum(sent) - sent[comm.rank]) if len(x) else 0


def _summed(comm: Any, x: torch.Tensor, *_: Any) -> int:
    return int(2 * (comm.size - 1) * x.nbytes // comm.size)


SENT: Final[dict[str, Callable[..., int]]] = {
    "all_reduce": _summed,
    "add_reduced": _summed,
    "add_product": lambda comm, y, w, bias, x, *_: _summed(comm, x),
    "all_gather": lambda comm, x: (comm.size - 1) * x.nbytes,
    "reduce_scatter": lambda comm, x: (comm.size - 1) * x.nbytes // comm.size,
    "all_to_all": _all_to_all,
    "exchange": _whole,
    "send": _whole,
}
"""Method → bytes that one rank sends in a call of it."""
NAMES: Final = {
    "all_reduce": "all-reduce", "add_reduced": "all-reduce", "add_product": "all-reduce",
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "exchange": "send",
    "send": "send",
}  # fmt: skip
"""In the planner's words."""


class Counts:
    """Since the last `clear`. Ranks may be threads of one process."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.sent: collections.Counter[str] = collections.Counter()
        self._inner = threading.local()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Begin again."""
        self.calls.clear()
        self.sent.clear()

    def wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that is counted, unless it is asked by another one of them."""

        def call(comm: Any, x: torch.Tensor, *given: Any, **named: Any) -> Any:
            if getattr(self._inner, "is_inside", False):
                return original(comm, x, *given, **named)
            if Reduction.MIN not in given and Reduction.MAX not in given:
                with self._lock:
                    self.calls[NAMES[name]] += 1
                    self.sent[NAMES[name]] += SENT[name](comm, x, *given)
            self._inner.is_inside = True
            try:
                return original(comm, x, *given, **named)
            finally:
                self._inner.is_inside = False

        return call


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Of all engines that this process makes meanwhile."""
    counts, originals = Counts(), list[tuple[type, str, Any]]()
    for kind in (GlooComm, NcclComm, PeerComm):
        for name in SENT:
            original = kind.__dict__.get(name)
            if original is not None:
                originals.append((kind, name, original))
                setattr(kind, name, counts.wrapped(name, original))
    try:
        yield counts
    finally:
        for kind, name, original in originals:
            setattr(kind, name, original)


def wire_bytes() -> int:
    """That this process has sent through TCP so far, as the other ends have acknowledged. 0 where this is not Linux."""
    total, seen, folder = 0, set[str](), pathlib.Path("/proc/self/fd")
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            target, number = os.readlink(path), int(path.name)
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:") and target not in seen:
            seen.add(target)
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, BYTES_ACKED)[0] if len(info) >= BYTES_ACKED + 8 else 0
    return total
