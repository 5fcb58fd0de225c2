"""Sums over the ranks of one host through memory that they write into one another, in CUDA C++ (csrc/cuda/reduce.cu).

Owns the build, this rank's memory, its mapping in the others and the launch. Does not own how ranks exchange handles,
nor which sums go this way (`compute/dist/peers.py`).
Invariants: every rank makes the same calls in the same order; a launch allocates at most its result and never waits for
the host, so it can be captured; no NVLink multicast.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from quire.kernels.gemm.sent import SENT_ROWS, Places
from quire.kernels.hopper import build_obstacle, load_variant
from quire.planner.peers import CELL_BYTES, CONTROL_BYTES, MAX_RANKS, MAX_ROW_CELLS, PeerLayout

logger = logging.getLogger("quire.engine")

DTYPES: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
HANDLE_BYTES: Final = 64

EAGER_TIMEOUT_S: Final = 600.0
"""A rank may be compiling what this one has already."""
REPLAY_TIMEOUT_S: Final = 20.0
"""Of a captured call: sooner than the watch over ranks ends the engine, which cannot name who is missing in a sum."""

Norm = tuple[torch.Tensor, float]
"""Weight [h] and eps of an RMS norm."""


class _Peers(ctypes.Structure):
    """QuirePeers in csrc/cuda/reduce/peers.h."""

    _fields_ = [
        ("base", ctypes.c_void_p * MAX_RANKS),
        ("fault", ctypes.POINTER(ctypes.c_int64)),
        *[(name, ctypes.c_int64) for name in (
            "parts_at", "part_cells", "whole_at", "whole_cells", "sent_at", "sent_cells",
        )],
        *[(name, ctypes.c_int32) for name in ("rank", "size")],
    ]  # fmt: skip


class _Args(ctypes.Structure):
    """QuireReduceArgs in csrc/cuda/reduce.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("x", "residual", "weight", "normed")],
        *[(name, ctypes.c_int64) for name in ("n_cells", "timeout_ns")],
        *[(name, ctypes.c_int32) for name in ("row_cells", "h")],
        ("eps", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("dtype", "two_shots", "sent")],
    ]


def obstacle(n_ranks: int) -> str | None:
    """Why this machine's ranks cannot sum so, or None. The first call may compile (seconds)."""
    if not 2 <= n_ranks <= MAX_RANKS:
        return f"{n_ranks} ranks: they must be 2 to {MAX_RANKS}"
    return build_obstacle(lambda: _library(n_ranks))


@functools.cache
def _library(n_ranks: int) -> ctypes.CDLL:
    library = load_variant("reduce.cu", (f"-DQUIRE_RANKS={n_ranks}",))
    library.quire_peers_take.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
    library.quire_peers_map.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.quire_peers_give_up.argtypes = [ctypes.c_void_p]
    for leave in (library.quire_peers_unmap, library.quire_peers_leave):
        leave.argtypes, leave.restype = [ctypes.c_void_p], None
    library.quire_reduce.argtypes = [ctypes.c_void_p] * 3
    return library


class PeerMemory:
    """One rank's memory, and where it sees that of the others. On the current device."""

    def __init__(self, rank: int, size: int, one_shot_bytes: int, two_shots_bytes: int) -> None:
        """The longest messages of either kind in one launch. Raises RuntimeError if it cannot be had."""
        self._library, self._peers = _library(size), _Peers(rank=rank, size=size)
        self._device = torch.cuda.current_device()
        peers, layout = self._peers, PeerLayout(size, one_shot_bytes, two_shots_bytes)
        peers.parts_at, peers.whole_at, peers.sent_at = CONTROL_BYTES, layout.whole_at, layout.sent_at
        peers.part_cells, peers.whole_cells, peers.sent_cells = layout.part_cells, layout.whole_cells, layout.sent_cells
        self.n_bytes = layout.n_bytes
        self._most = (one_shot_bytes, two_shots_bytes)
        self._leave = weakref.finalize(self, _leave, self._library, peers)
        self._leave.atexit = False
        handle, base = ctypes.create_string_buffer(HANDLE_BYTES), ctypes.c_void_p()
        code = self._library.quire_peers_take(self.n_bytes, ctypes.byref(base), ctypes.byref(peers.fault), handle)
        peers.base[rank] = base.value
        self.handle = handle.raw
        """For the others' `map`."""
        if code:
            self.close()
            raise RuntimeError(f"{self.n_bytes} bytes to share with other GPUs cannot be had: CUDA error {code}")

    def map(self, handles: Sequence[bytes]) -> None:
        """handles: of all ranks. Nothing may be summed before all have done so. Raises RuntimeError."""
        for other, handle in enumerate(handles):
            if other == self._peers.rank:
                continue
            base = ctypes.c_void_p()
            code = self._library.quire_peers_map(handle, ctypes.byref(base))
            if code:
                raise RuntimeError(f"the memory of rank {other} cannot be reached: CUDA error {code}")
            self._peers.base[other] = base.value

    def misfit(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> str:
        """Why `reduce` does not take these tensors; empty: it does."""
        given = [x, *(tensor for tensor in (residual, norm and norm[0]) if tensor is not None)]
        if x.dtype not in DTYPES or any(tensor.dtype != x.dtype or not tensor.is_contiguous() for tensor in given):
            return "tensors are not contiguous, of one type, and that bfloat16, float16 or float32"
        if any(tensor.data_ptr() % CELL_BYTES for tensor in given) or x.nbytes % CELL_BYTES:
            return f"an address or a size is not a multiple of {CELL_BYTES} bytes"
        if not x.nbytes:
            return "there is nothing to sum"
        if norm is None:
            return ""
        row_bytes = x.shape[-1] * x.itemsize
        if row_bytes % CELL_BYTES or row_bytes > MAX_ROW_CELLS * CELL_BYTES:
            return f"a row of {row_bytes} bytes is not a multiple of {CELL_BYTES} up to {MAX_ROW_CELLS * CELL_BYTES}"
        return ""

    def reduce(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        two_shots: bool,
        timeout_s: float | None = None,
    ) -> torch.Tensor | None:
        """x, which fits: its sum over ranks in place; or added to `residual`, whose norm, if wanted, is returned. In as
        many launches as the memory makes of it. timeout_s: None for the usual ones."""
        normed = None if norm is None else torch.empty_like(x)
        row = (-1,) if norm is None else (-1, x.shape[-1])
        step = max(self._most[two_shots] // (x.itemsize * (1 if norm is None else x.shape[-1])), 1)

        def parts(tensor: torch.Tensor | None, n: int) -> Sequence[torch.Tensor | None]:
            return [None] * n if tensor is None else torch.split(tensor.view(row), step)

        terms = parts(x, 0)
        for given in zip(terms, parts(residual, len(terms)), parts(normed, len(terms)), strict=True):
            self._launch(*given, norm, two_shots=two_shots, sent=False, timeout_s=timeout_s)
        return normed

    def places(self, *, to_all: bool) -> Places:
        """Where the next product may send its term, of which `reduce_sent` is to be the next call."""
        peers = self._peers
        at = peers.sent_at + peers.rank * peers.sent_cells * CELL_BYTES
        bases = peers.base[: peers.size]
        return Places(
            tuple(base + at for base in bases), bases[peers.rank], peers.size * peers.sent_cells * CELL_BYTES, to_all
        )

    def most_sent_rows(self, row_bytes: int, *, to_all: bool) -> int:
        """Of a product at a time: in two hops a rank gets those that it owns, in boxes of SENT_ROWS."""
        rows: int = self._most[True] // self._peers.size // row_bytes // SENT_ROWS * SENT_ROWS
        return rows if to_all else rows * self._peers.size

    def reduce_sent(
        self,
        residual: torch.Tensor,
        norm: Norm | None,
        normed: torch.Tensor | None,
        *,
        to_all: bool,
        timeout_s: float | None = None,
    ) -> None:
        """The sum of what the product before, of as many rows as `residual` [m, h], has sent is added to it, and its
        norm goes to `normed`. As `reduce`, in one launch."""
        self._launch(None, residual, normed, norm, two_shots=not to_all, sent=True, timeout_s=timeout_s)

    def _launch(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        normed: torch.Tensor | None,
        norm: Norm | None,
        *,
        two_shots: bool,
        sent: bool,
        timeout_s: float | None,
    ) -> None:
        """Of rows, or without a norm of anything."""
        if timeout_s is None:
            timeout_s = REPLAY_TIMEOUT_S if torch.cuda.is_current_stream_capturing() else EAGER_TIMEOUT_S
        like = residual if x is None else x
        assert like is not None
        row_size = like.shape[-1]
        args = _Args(
            *(None if tensor is None else tensor.data_ptr() for tensor in (x, residual, norm and norm[0], normed)),
            like.nbytes // CELL_BYTES, int(timeout_s * 1e9), row_size * like.itemsize // CELL_BYTES, row_size,
            0.0 if norm is None else norm[1], DTYPES[like.dtype], int(two_shots), int(sent),
        )  # fmt: skip
        stream = torch.cuda.current_stream(like.device).cuda_stream
        code = self._library.quire_reduce(ctypes.byref(self._peers), ctypes.byref(args), stream)
        if code:
            raise RuntimeError(f"the sum of {tuple(like.shape)} over ranks could not be launched: CUDA error {code}")

    @property
    def lost(self) -> tuple[int, int] | None:
        """(rank, call) that this rank has waited for in vain: its results since then are void. Never waits itself."""
        fault = self._peers.fault
        return (fault[0] - 1, fault[1]) if fault and fault[0] else None

    def give_up(self) -> None:
        """Wait for no other rank any more, in sums that run and in those to come, which are void. In any thread, beside
        one that waits for the device."""
        with torch.cuda.device(self._device):
            code = self._library.quire_peers_give_up(ctypes.byref(self._peers))
        if code:
            logger.warning("sums over GPUs that wait for a lost rank end by their own time-out: CUDA error %d", code)

    def unmap(self) -> None:
        """Let go of the others' memory, when all sums have ended. Only `close` may follow."""
        torch.cuda.synchronize()
        self._library.quire_peers_unmap(ctypes.byref(self._peers))

    def close(self) -> None:
        """No rank may sum afterwards. A second call does nothing."""
        torch.cuda.synchronize()
        self._leave()


def _leave(library: ctypes.CDLL, peers: _Peers) -> None:
    library.quire_peers_leave(ctypes.byref(peers))
    ctypes.memset(ctypes.byref(peers), 0, ctypes.sizeof(peers))
