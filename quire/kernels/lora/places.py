"""Adapters of one matrix on a CPU, by place, and the table of them that the native kernels read.

Owns both layouts, and the structs of csrc/cpu/quire_cpu.h. Does not own products (`cpu`, `reference`).
Invariant: the table stays where it is, so that recorded steps can point to it; what it points to lives as long.
"""

from __future__ import annotations

import ctypes
import dataclasses

import torch

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Of a matrix of several parts, one that has an adapter."""

    first: int
    """Its first line of A, of as many as B has."""
    start: int
    """Its first output."""
    b: torch.Tensor
    """[rank, outputs]: B transposed, contiguous, the scale multiplied in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """The adapter of a matrix."""

    a: torch.Tensor
    """[sum of ranks, k], contiguous: those of the parts one under another."""
    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """Of its numbers."""
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)


class NativePart(ctypes.Structure):
    """QuireAdapterPart in csrc/cpu/quire_cpu.h."""

    _fields_ = (("b", _P), *((name, _L) for name in ("first", "rank", "start", "n")))


class NativeAdapter(ctypes.Structure):
    """QuireAdapter in csrc/cpu/quire_cpu.h."""

    _fields_ = (("a", _P), ("parts", _P), ("n_lines", _L), ("n_parts", _L))


class NativeLora(ctypes.Structure):
    """QuireLora in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, _P) for name in ("adapters", "x", "norm", "y", "places")),
        *((name, _L) for name in ("m", "n", "k", "x_row", "y_row")),
        ("eps", ctypes.c_float), ("dtype", _I), ("n_threads", _I),
    )  # fmt: skip


class Places:
    """Of a matrix [n, k]."""

    def __init__(self, n_places: int, n: int, k: int) -> None:
        self.shape = (n, k)
        self.table = (_P * n_places)()
        """Addresses of `NativeAdapter`, by place; null: there is nothing."""
        self._lines: list[Lines | None] = [None] * n_places
        self._native: list[tuple[object, ...]] = [()] * n_places

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, place: int) -> Lines | None:
        return self._lines[place]

    def put(self, place: int, lines: Lines | None) -> None:
        """What an adapter has for the matrix, None: nothing. Raises ValueError if it does not fit."""
        adapter = parts = None
        if lines is not None:
            self._check(lines)
            parts = (NativePart * len(lines.parts))(
                *((one.b.data_ptr(), one.first, len(one.b), one.start, one.b.shape[1]) for one in lines.parts)
            )
            adapter = NativeAdapter(lines.a.data_ptr(), ctypes.addressof(parts), len(lines.a), len(parts))
        self.table[place] = None if adapter is None else ctypes.addressof(adapter)
        self._lines[place], self._native[place] = lines, (adapter, parts)

    def _check(self, lines: Lines) -> None:
        n, k = self.shape
        if lines.a.shape[1] != k or not lines.a.is_contiguous():
            raise ValueError(f"a {tuple(lines.a.shape)} must be contiguous, of {k} inputs")
        for part in lines.parts:
            if not part.b.is_contiguous() or part.b.dtype != lines.a.dtype:
                raise ValueError(f"b {part.b.dtype} must be contiguous and of a's dtype {lines.a.dtype}")
            if part.start + part.b.shape[1] > n or part.first + len(part.b) > len(lines.a):
                raise ValueError(f"the parts of an adapter do not fit {n} outputs and {len(lines.a)} lines")
