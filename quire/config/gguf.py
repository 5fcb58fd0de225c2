"""The header of a GGUF file: metadata and tensor table, checked in full before anything of them is used. Torch-free.

Owns the container (versions 2 and 3, little-endian); does not own what keys mean (`config/gguf_model`) nor weights.
Files are read with ordinary reads, never mapped. Arrays stay in the file until asked for.
Invariant: any bytes give a header or a LoadError, in memory and time bounded by the limits below.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from quire.core.errors import LoadError, shown
from quire.core.files import open_regular

if TYPE_CHECKING:
    import numpy as np

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 128 << 20
MAX_PAIRS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_ITEMS: Final = 1 << 23
"""Longest array."""
MAX_NAME_BYTES: Final = 256
"""Longest key or tensor name."""
MAX_STRING_BYTES: Final = 16 << 20
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32
SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type id of a value → its code in `struct`."""
STRING: Final = 8
ARRAY: Final = 9
BLOCKS: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""Supported tensor types: id → (name, elements a block, bytes a block)."""
OTHER_TYPES: Final = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
"""Names of types that are refused."""

Signature = tuple[int, int, int]


class Array(msgspec.Struct, frozen=True):
    """An array that is still in the file."""

    kind: int
    """Type id of its items."""
    n_items: int
    start: int
    """First byte of the items, from the beginning of the file."""
    n_bytes: int


class Tensor(msgspec.Struct, frozen=True):
    """One entry of the tensor table."""

    name: str
    dtype: str
    """Name of the type in `BLOCKS`."""
    shape: tuple[int, ...]
    """Outermost dimension first, as in torch (the file has the reverse)."""
    start: int
    """First byte, from the beginning of the file."""
    n_bytes: int


class Header(msgspec.Struct, frozen=True):
    """What a GGUF file says before its weights."""

    path: pathlib.Path
    signature: Signature
    """Inode, size and modification time when it was read."""
    values: dict[str, Any]
    """Key → number, bool, string or `Array`."""
    tensors: dict[str, Tensor]

    def strings(self, key: str) -> list[str]:
        """The array of strings under `key`, empty when absent. LoadError if it is something else or not UTF-8."""
        array = self._array(key)
        if array is None:
            return []
        if array.kind != STRING:
            raise LoadError(f"{self.path}: {key} must be an array of strings")
        data, found, position = self._bytes(array), [], 0
        for _ in range(array.n_items):
            end = position + 8 + int.from_bytes(data[position : position + 8], "little")
            found.append(_text(data[position + 8 : end], f"{self.path}: an item of {key}"))
            position = end
        return found

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        """The array of numbers under `key`, empty when absent. LoadError if it is something else."""
        import numpy as np  # takes a tenth of a second, and only vocabularies ask for numbers

        array = self._array(key)
        if array is None:
            return np.empty(0)
        if array.kind == STRING:
            raise LoadError(f"{self.path}: {key} must be an array of numbers")
        return np.frombuffer(self._bytes(array), np.dtype(SCALARS[array.kind]).newbyteorder("<"))

    def floats(self, tensor: Tensor) -> list[float]:
        """The values of a small F32 tensor."""
        return list(struct.unpack(f"<{tensor.n_bytes // 4}f", self._read(tensor.start, tensor.n_bytes)))

    def _array(self, key: str) -> Array | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Array):
            raise LoadError(f"{self.path}: {key} = {shown(value)} must be an array")
        return value

    def _bytes(self, array: Array) -> bytes:
        return self._read(array.start, array.n_bytes)

    def _read(self, start: int, n_bytes: int) -> bytes:
        with _open(self.path) as (file, signature):
            if signature != self.signature:
                raise LoadError(f"{self.path} changed while being loaded; load it again when it is complete")
            file.seek(start)
            data = file.read(n_bytes)
        if len(data) < n_bytes:
            raise LoadError(f"{self.path} ended while being read: it was truncated meanwhile")
        return data


def is_gguf(path: pathlib.Path) -> bool:
    """Whether a model path means a GGUF file (by its name; the content is checked when it is read)."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def read_header(path: pathlib.Path) -> Header:
    """The header of a GGUF file; kept until the file or the path changes. Raises LoadError."""
    with _open(path) as (_, signature):
        pass
    return _parse(path, signature)


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[tuple[BinaryIO, Signature]]:
    """A regular file and its signature; LoadError for anything else and for errors while it is read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            yield file, (status.st_ino, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None


@functools.lru_cache(maxsize=2)
def _parse(path: pathlib.Path, signature: Signature) -> Header:
    with _open(path) as (file, now):
        if now != signature:
            raise LoadError(f"{path} changed while being loaded; load it again when it is complete")
        source = _Source(file, signature[1], str(path))
        n_tensors, n_pairs = _read_counts(source)
        values = _read_values(source, n_pairs)
        alignment = _alignment(values, source.where)
        tensors = _read_tensors(source, n_tensors, alignment)
    if values.get("split.count", 1) not in (0, 1):
        raise LoadError(
            f"{path} is one of {shown(values['split.count'])} parts (split.count);"
            " join them first with llama.cpp's llama-gguf-split --merge"
        )
    return Header(path, signature, values, tensors)


class _Source:
    """The bytes of a header, none of which are trusted."""

    def __init__(self, file: BinaryIO, file_bytes: int, where: str) -> None:
        self.file = file
        self.file_bytes = file_bytes
        self.where = where
        self.position = 0

    def error(self, problem: str) -> LoadError:
        """To be raised by the caller."""
        return LoadError(f"{self.where}: {problem} (at byte {self.position:,})")

    def need(self, n_bytes: int, what: str) -> None:
        """LoadError unless that many bytes of the header are left."""
        if n_bytes > self.file_bytes - self.position:
            left = self.file_bytes - self.position
            raise self.error(f"is truncated or damaged: {what} needs {n_bytes:,} bytes, {left:,} are left")
        if self.position + n_bytes > MAX_HEADER_BYTES:
            raise self.error(f"its header is longer than {MAX_HEADER_BYTES:,} bytes, the limit")

    def take(self, n_bytes: int, what: str) -> bytes:
        """The next bytes."""
        self.need(n_bytes, what)
        data = self.file.read(n_bytes)
        if len(data) < n_bytes:
            raise self.error("ended while being read: it was truncated meanwhile")
        self.position += n_bytes
        return data

    def number(self, code: str, what: str) -> Any:
        """The next scalar, by its code in `struct`."""
        data = self.take(struct.calcsize("<" + code), what)
        if code == "?" and data not in (b"\0", b"\1"):
            raise self.error(f"{what} is a bool with the byte {data[0]}")
        return struct.unpack("<" + code, data)[0]

    def string(self, what: str, limit: int) -> str:
        """The next string."""
        n_bytes = self.number("Q", what)
        if n_bytes > limit:
            raise self.error(f"{what} has {n_bytes:,} bytes; the limit is {limit:,}")
        return _text(self.take(n_bytes, what), f"{self.where}: {what}")

    def skip_strings(self, n_items: int, what: str) -> None:
        """Pass over strings, each length checked."""
        read, position = self.file.read, self.position
        end = min(self.file_bytes, MAX_HEADER_BYTES)
        for _ in range(n_items):
            n_bytes = int.from_bytes(read(8), "little")
            position += 8 + n_bytes
            if position > end:
                self.need(position - self.position, what)
            read(n_bytes)
        self.position = position


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise LoadError(f"{what} is not valid UTF-8: {shown(data)}") from None


def _read_counts(source: _Source) -> tuple[int, int]:
    """(tensors, pairs), after magic and version."""
    magic = source.take(4, "the magic number")
    if magic != MAGIC:
        raise LoadError(f"{source.where} is not a GGUF file: it begins with {shown(magic)}, not {shown(MAGIC)}")
    version = source.number("I", "the version")
    if version not in VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        problem = "is a big-endian file" if big else f"has GGUF version {version:,}"
        raise LoadError(f"{source.where} {problem}; supported are versions 2 and 3, little-endian: convert it again")
    n_tensors = source.number("Q", "the number of tensors")
    n_pairs = source.number("Q", "the number of metadata pairs")
    for n, limit, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_pairs, MAX_PAIRS, "metadata pairs")):
        if n > limit:
            raise source.error(f"states {n:,} {what}; the limit is {limit:,}")
    return n_tensors, n_pairs


def _read_values(source: _Source, n_pairs: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = source.string("a metadata key", MAX_NAME_BYTES)
        if key in values:
            raise source.error(f"repeats the metadata key {shown(key)}")
        kind = source.number("I", shown(key))
        values[key] = _read_array(source, key) if kind == ARRAY else _read_value(source, kind, key)
    return values


def _read_value(source: _Source, kind: int, key: str) -> Any:
    if kind == STRING:
        return source.string(shown(key), MAX_STRING_BYTES)
    if kind not in SCALARS:
        raise source.error(f"{shown(key)} has the unknown value type {kind}")
    return source.number(SCALARS[kind], shown(key))


def _read_array(source: _Source, key: str) -> Array:
    kind, n_items = source.number("I", shown(key)), source.number("Q", shown(key))
    if kind == ARRAY:
        raise source.error(f"{shown(key)} is an array of arrays, which no known key is")
    if kind != STRING and kind not in SCALARS:
        raise source.error(f"{shown(key)} is an array of the unknown value type {kind}")
    if n_items > MAX_ITEMS:
        raise source.error(f"{shown(key)} has {n_items:,} items; the limit is {MAX_ITEMS:,}")
    start = source.position
    if kind == STRING:
        source.need(8 * n_items, shown(key))
        source.skip_strings(n_items, shown(key))
    else:
        source.take(n_items * struct.calcsize("<" + SCALARS[kind]), shown(key))
    return Array(kind, n_items, start, source.position - start)


def _alignment(values: dict[str, Any], where: str) -> int:
    value = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise LoadError(f"{where}: general.alignment = {shown(value)} must be a power of two up to {MAX_ALIGNMENT:,}")
    return value


def _read_tensors(source: _Source, n_tensors: int, alignment: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for _ in range(n_tensors):
        tensor = _read_tensor(source)
        if tensor.name in tensors:
            raise source.error(f"repeats the tensor {shown(tensor.name)}")
        tensors[tensor.name] = tensor
    data_start = _aligned(source.position, alignment)
    end, placed = 0, {}
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start != _aligned(end, alignment):
            raise LoadError(
                f"{source.where}: tensor {shown(tensor.name)} has offset {tensor.start:,}, but the one before it ends"
                f" at {end:,}: it must follow, aligned to {alignment}"
            )
        end = tensor.start + tensor.n_bytes
        placed[tensor.name] = msgspec.structs.replace(tensor, start=data_start + tensor.start)
    if data_start + end > source.file_bytes:
        raise LoadError(
            f"{source.where} is truncated: it has {source.file_bytes:,} bytes, its tensors end at {data_start + end:,};"
            " fetch it again"
        )
    return placed


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _read_tensor(source: _Source) -> Tensor:
    """One entry; `start` is still relative to the data."""
    name = source.string("a tensor's name", MAX_NAME_BYTES)
    at = f"tensor {shown(name)}"
    n_dimensions = source.number("I", at)
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise source.error(f"{at} has {n_dimensions:,} dimensions; from 1 to {MAX_DIMENSIONS} are allowed")
    shape = tuple(source.number("Q", at) for _ in range(n_dimensions))[::-1]
    kind, offset = source.number("I", at), source.number("Q", at)
    if kind not in BLOCKS:
        named = f"{OTHER_TYPES[kind]} (id {kind})" if kind in OTHER_TYPES else f"of id {kind:,}"
        supported = ", ".join(name for name, _, _ in BLOCKS.values())
        raise source.error(f"{at} has the unsupported type {named}; supported are {supported}")
    dtype, block_len, block_bytes = BLOCKS[kind]
    if not all(shape) or math.prod(shape) >= 2**48 or shape[-1] % block_len:
        raise source.error(f"{at} has shape {shape}; {dtype} needs sizes >= 1, the last a multiple of {block_len}")
    return Tensor(name, dtype, shape, offset, math.prod(shape) // block_len * block_bytes)
