"""Adapters of one matrix on a CPU, by place, and the table of them that the native kernels read.

Owns both layouts, and the structs of csrc/cpu/quire_cpu.h. Does not own products (`cpu`, `reference`).
Invariant: the table stays where it is, so that recorded steps can point to it; what it points to lives as long.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


LINES, OUTPUTS = 16, 64
"""Of A in a tile, and of B; csrc/cpu/lora.cpp."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Of a matrix of several parts, one that has an adapter."""

    first: int
    """Its first line of A, of as many as B has columns."""
    start: int
    """Its first output."""
    n: int
    """Its outputs."""
    b: torch.Tensor
    """[ceil(n / OUTPUTS), rank, OUTPUTS], contiguous, the scale multiplied in; zeros behind the last output."""

    @property
    def rank(self) -> int:
        """Of its matrices."""
        return self.b.shape[1]

    @property
    def matrix(self) -> torch.Tensor:
        """B as it was given: [n, rank]."""
        return self.b.transpose(1, 2).flatten(0, 1)[: self.n]


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """The adapter of a matrix, laid out so that both products read it from end to end: A, then B of each part."""

    a: torch.Tensor
    """[ceil(n_lines / LINES), k, LINES], contiguous: those of the parts one under another, and zeros."""
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> Lines:
        """parts: of each that has an adapter its first output, A [rank, k] and B [n, rank]."""
        lines = _tiled(torch.cat([a for _, a, _ in parts]), LINES)
        tiles = [lines, *(_tiled(b, OUTPUTS) for _, _, b in parts)]
        memory = torch.cat([one.flatten() for one in tiles]).to(dtype)  # in one piece, as it is asked for ahead
        views = memory.split([one.numel() for one in tiles])  # type: ignore[no-untyped-call]
        own_a, *own_b = (view.view(one.shape) for view, one in zip(views, tiles, strict=True))
        found, first = [], 0
        for (start, a, b), own in zip(parts, own_b, strict=True):
            found.append(Part(first, start, len(b), own))
            first += len(a)
        return cls(own_a, tuple(found))

    @property
    def n_lines(self) -> int:
        """Sum of the ranks."""
        return sum(part.rank for part in self.parts)

    @property
    def matrix(self) -> torch.Tensor:
        """A as it was given: [n_lines, k]."""
        return self.a.transpose(1, 2).flatten(0, 1)[: self.n_lines]

    @property
    def n_bytes(self) -> int:
        """Of its numbers."""
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)


def _tiled(matrix: torch.Tensor, n: int) -> torch.Tensor:
    """[rows, columns] → [tiles, columns, n], n rows in each, zeros behind the last."""
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % n))
    return padded.view(-1, n, matrix.shape[1]).transpose(1, 2).contiguous()


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
        *((name, _L) for name in ("m", "n", "k", "x_row", "y_row", "n_places")),
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
                *(NativePart(one.b.data_ptr(), one.first, one.rank, one.start, one.n) for one in lines.parts)
            )
            adapter = NativeAdapter(lines.a.data_ptr(), ctypes.addressof(parts), lines.n_lines, len(parts))
        self.table[place] = None if adapter is None else ctypes.addressof(adapter)
        self._lines[place], self._native[place] = lines, (adapter, parts)

    def _check(self, lines: Lines) -> None:
        n, k = self.shape
        if lines.a.shape[1] != k:
            raise ValueError(f"an adapter of {lines.a.shape[1]} inputs does not fit {k}")
        if any(part.start + part.n > n for part in lines.parts):
            raise ValueError(f"the parts of an adapter do not fit {n} outputs")
