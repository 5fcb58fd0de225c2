"""The header of a safetensors file: parsed and checked in full before a byte of weights is read.

Stricter than the format's own library where that trusts the writer: duplicate names, holes, overlaps, and any length
that differs from the file's are refused. Invariant: any bytes give a header or a LoadError, in bounded memory.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import collections
import json
import math
from typing import Any, BinaryIO, Final

import msgspec

from quire.config.fields import is_integer
from quire.core.errors import LoadError, shown

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
MAX_DIMENSIONS: Final = 16
ITEM_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""dtype of the format → bits an element."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    n_bytes: int


def read_header(file: BinaryIO, file_bytes: int, where: str) -> list[Entry]:
    """The tensors of a safetensors file of `file_bytes` bytes, in the order of their bytes.

    `file` stands at its beginning; `where` names it in errors. Raises LoadError.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        what = "is empty" if not prefix else f"is not a safetensors file: it has {file_bytes} bytes, and 8 come first"
        raise LoadError(f"{where} {what}; fetch it again")
    if length > max(MAX_HEADER_BYTES, file_bytes - 8):
        raise LoadError(f"{where} is not a safetensors file: what it begins with is no length of a header")
    if length > file_bytes - 8:
        raise LoadError(f"{where} is truncated: {file_bytes:,} bytes cannot hold a header of {length:,} bytes")
    if length > MAX_HEADER_BYTES:
        raise LoadError(f"{where} has a header of {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
    header = file.read(length)
    if len(header) < length:
        raise LoadError(f"{where} ended inside its header; was it changed while being read?")
    values = _decode(header, where)
    _check_metadata(values.pop("__metadata__", {}), where)
    entries = [_entry(name, value, 8 + length, where) for name, value in values.items()]
    entries.sort(key=lambda entry: (entry.start, entry.n_bytes))
    _check_cover(entries, 8 + length, file_bytes, where)
    return entries


def _decode(header: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            name, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
            raise LoadError(f"{where}: header repeats {shown(name)}")
        return values

    try:
        values = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise LoadError(f"{where}: header is nested too deeply") from None
    except ValueError as error:
        raise LoadError(f"{where}: header is not valid JSON: {shown(str(error))}") from None
    if not isinstance(values, dict):
        raise LoadError(f"{where}: header must be a JSON object, not {shown(values)}")
    return values


def _check_metadata(value: object, where: str) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise LoadError(f"{where}: __metadata__ must map text to text, not {shown(value)}")


def _entry(name: str, value: Any, data_start: int, where: str) -> Entry:
    """One header item, its numbers checked against one another."""
    at = f"{where}: tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise LoadError(f"{at} must have dtype, shape and data_offsets, not {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise LoadError(f"{at} has dtype {shown(dtype)}; known are {', '.join(ITEM_BITS)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise LoadError(f"{at} has shape {shown(shape)}; it must be at most {MAX_DIMENSIONS} integers >= 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise LoadError(f"{at} has data_offsets {shown(offsets)}; they must be two integers, 0 <= begin <= end")
    n_bits = math.prod(shape) * ITEM_BITS[dtype]
    if (offsets[1] - offsets[0]) * 8 != n_bits:
        raise LoadError(f"{at} has {offsets[1] - offsets[0]:,} bytes; {dtype} {shown(shape)} needs {n_bits / 8:,.0f}")
    return Entry(name, dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(is_integer(item) and 0 <= item < 2**62 for item in value)


def _check_cover(entries: list[Entry], data_start: int, file_bytes: int, where: str) -> None:
    """The tensors must cover the file's data one after another, to its last byte."""
    end = data_start
    for entry in entries:
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "leaves a hole before it"
            raise LoadError(f"{where}: tensor {shown(entry.name)} {what} (byte {entry.start:,}, expected {end:,})")
        end += entry.n_bytes
    if end > file_bytes:
        raise LoadError(f"{where} is truncated: it has {file_bytes:,} bytes of {end:,}; fetch it again")
    if end < file_bytes:
        raise LoadError(f"{where} has {file_bytes - end:,} bytes after its last tensor")
