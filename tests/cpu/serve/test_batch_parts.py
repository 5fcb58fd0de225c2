"""A batch file in parts."""

from __future__ import annotations

import io
import json

import msgspec

from quire.serve.batch.parts import PART_BYTES, PART_LINES, Part, cut

LIMIT = 1 << 20


def line(name: str, more: int = 0) -> bytes:
    body = {"model": "demo", "prompt": "x" * more}
    return json.dumps({"custom_id": name, "url": "/v1/completions", "body": body}).encode() + b"\n"


def test_the_parts_are_the_file() -> None:
    lines = [line(f"r{number}") for number in range(2 * PART_LINES + 5)]
    data = b"".join(lines)
    parts = list(cut(io.BytesIO(data), LIMIT))
    found = [data[part.start : part.start + part.n_bytes] for part in parts]
    assert b"".join(found) == data
    assert [one.count(b"\n") for one in found] == [PART_LINES, PART_LINES, 5]


def test_an_id_is_found_across_parts_where_it_is_good() -> None:
    lines = [line(f"r{number}") for number in range(PART_LINES)]
    lines[2] = b'{"custom_id": "bad"}\n'
    later = [b"\n", line("bad"), line("r7"), line("bad"), line("new")[:-1]]
    parts = list(cut(io.BytesIO(b"".join([*lines, *later])), LIMIT))
    assert [part.first_line for part in parts] == [0, PART_LINES]
    again = PART_LINES + 2
    assert [part.repeated for part in parts] == [{}, {again: 7, again + 1: PART_LINES + 1}]
    assert msgspec.json.decode(msgspec.json.encode(parts[1]), type=Part) == parts[1]


def test_a_part_ends_with_a_line_however_long() -> None:
    data = line("a", 3 * PART_BYTES) + line("b")
    parts = list(cut(io.BytesIO(data), LIMIT))
    assert [part.n_bytes for part in parts] == [len(line("a", 3 * PART_BYTES)), len(line("b"))]
    assert list(cut(io.BytesIO(b""), LIMIT)) == []
