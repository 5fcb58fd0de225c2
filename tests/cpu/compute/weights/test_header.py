"""Safetensors headers: what the library writes is read; anything damaged is a LoadError that says what."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import float16, float32, int64, zeros

from quire.compute.weights.header import Entry, read_header
from quire.core.errors import LoadError

F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def parse(content: bytes) -> list[Entry]:
    return read_header(io.BytesIO(content), len(content), "x.safetensors")


def content(header: Any, n_data: int = 24, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(n_data)


def test_reads_what_the_library_writes() -> None:
    arrays = {"b": zeros((3, 5), float32), "a": zeros(7, float16), "one": zeros((), int64), "none": zeros((0, 4))}
    raw = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    entries = {entry.name: entry for entry in parse(raw)}
    assert {name: entry.shape for name, entry in entries.items()} == {name: a.shape for name, a in arrays.items()}
    assert sum(entry.n_bytes for entry in entries.values()) == sum(array.nbytes for array in arrays.values())
    assert max(entry.start + entry.n_bytes for entry in entries.values()) == len(raw)
    assert entries["a"].dtype == "F16"


BAD = {
    "empty": (b"", "is empty"),
    "short prefix": (b"\1\0", "it has 2 bytes, and 8 come first"),
    "length beyond the file": (content({"a": F32}, length=10**6), "truncated"),
    "length of 2^63": (content({"a": F32}, length=2**63), "is not a safetensors file"),
    "not JSON": (content(b"{nope"), "not valid JSON"),
    "not UTF-8": (content(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "a list": (content([1]), "must be a JSON object"),
    "deep": (content(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "repeated name": (content(b'{"a": %b, "a": %b}' % ((json.dumps(F32).encode(),) * 2)), "repeats 'a'"),
    "metadata": (content({"__metadata__": {"a": 1}, "a": F32}), "__metadata__"),
    "item is a number": (content({"a": 3}), "must have dtype, shape and data_offsets"),
    "extra key": (content({"a": {**F32, "x": 1}}), "must have dtype, shape and data_offsets"),
    "unknown dtype": (content({"a": {**F32, "dtype": "F33"}}), "'F33'"),
    "dtype is a list": (content({"a": {**F32, "dtype": ["F32"]}}), "has dtype"),
    "negative size": (content({"a": {**F32, "shape": [-2, -3]}}), "shape"),
    "bool size": (content({"a": {**F32, "shape": [True, 6]}}), "shape"),
    "float size": (content({"a": {**F32, "shape": [2.0, 3]}}), "shape"),
    "overflowing shape": (content({"a": {**F32, "shape": [2**61, 2**61]}}), "needs"),
    "many dimensions": (content({"a": {**F32, "shape": [1] * 20}}), "at most 16"),
    "one offset": (content({"a": {**F32, "data_offsets": [24]}}), "data_offsets"),
    "backward": (content({"a": {**F32, "data_offsets": [24, 0]}}), "data_offsets"),
    "negative offset": (content({"a": {**F32, "data_offsets": [-24, 0]}}), "data_offsets"),
    "wrong size": (content({"a": {**F32, "data_offsets": [0, 20]}}, 20), "needs 24"),
    "hole": (content({"a": F32, "b": {**F32, "data_offsets": [28, 52]}}, 52), "leaves a hole"),
    "hole at the start": (content({"a": {**F32, "data_offsets": [4, 28]}}, 28), "leaves a hole"),
    "overlap": (content({"a": F32, "b": {**F32, "data_offsets": [20, 44]}}, 44), "overlaps"),
    "same bytes twice": (content({"a": F32, "b": F32}), "overlaps"),
    "truncated by one byte": (content({"a": F32}, 23), "truncated"),
    "one byte too many": (content({"a": F32}, 25), "1 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    raw, message = BAD[case]
    with pytest.raises(LoadError, match=r"x\.safetensors") as caught:
        parse(raw)
    assert message in caught.value.message
    assert len(caught.value.message) < 1000


def test_header_limit() -> None:
    with pytest.raises(LoadError, match="limit is 100,000,000"):
        read_header(io.BytesIO(struct.pack("<Q", 100_000_001)), 200_000_000, "x.safetensors")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "BF16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
items = st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}) | json_values


@settings(max_examples=200)
@given(st.binary(max_size=64) | st.builds(content, json_values) | st.builds(content, st.dictionaries(st.text(), items)))
def test_any_bytes_give_a_header_or_a_load_error(raw: bytes) -> None:
    try:
        entries = parse(raw)
    except LoadError:
        return
    end = 8 + int.from_bytes(raw[:8], "little")
    for entry in entries:
        assert entry.start == end
        end += entry.n_bytes
    assert end == len(raw)
