"""Traces from files: JSON lines or CSV, one request a line, in the spelling of Quire or of what others published.

    arrival_s, input_len, output_len [, prompt_token_ids | prefix_group, prefix_len]    Quire's own, JSON or CSV
    timestamp (ms), input_length, output_length [, hash_ids of 512 tokens]               Mooncake, JSON
    TIMESTAMP, ContextTokens, GeneratedTokens                                            Azure, CSV
    at_s, prompts, n, n_output                                                           `quire serve --record`, JSON

Owns reading and checking. Invariant: an error names the file, the line, the value and what it should be.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from quire.bench.simulate.requests import SimRequest
from quire.core.errors import ConfigError, shown
from quire.core.files import read_regular
from quire.planner.workload import MOST_TOKENS

MAX_TRACE_BYTES: Final = 2 << 30
LONGEST_S: Final = 366 * 86400.0
"""From the first request to the last: more is a wrong unit."""
HASH_TOKENS, MARK_TOKENS = 512, 32
"""Tokens that a hash of Mooncake's, or a mark of our own record, stands for."""


class _Reader:
    """One file: its keys of shared parts, and where it stands."""

    def __init__(self, path: str) -> None:
        self.path, self.line = path, 0
        self._keys: dict[object, int] = {}
        self._origin_s: float | None = None
        self.n_early = self.first_early = 0
        """Requests before the one above them, and the line of the first."""

    def refuse(self, what: str) -> ConfigError:
        return ConfigError(f"trace {shown(self.path)}, line {self.line}: {what}")

    def key(self, name: object) -> int:
        return self._keys.setdefault(name, len(self._keys))

    def since_first(self, time_s: float) -> float:
        """For traces whose times are of a day."""
        if self._origin_s is None:
            self._origin_s = time_s
        return time_s - self._origin_s

    def check_span(self, request: SimRequest, before: list[SimRequest]) -> None:
        """Counts a request that comes before the one above it. ConfigError for one too far from the first."""
        if not before:
            return
        if request.arrival_s < before[-1].arrival_s:
            self.n_early += 1
            self.first_early = self.first_early or self.line
        away_s = abs(request.arrival_s - before[0].arrival_s)
        if away_s > LONGEST_S:
            raise self.refuse(
                f"it comes {away_s:.3g} s away from the first request, more than a year: is its time in the right unit?"
            )

    def seconds(self, row: Mapping[str, Any], name: str, unit_s: float = 1.0) -> float:
        value = row[name]
        try:
            number = float(value) * unit_s
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or isinstance(value, bool):
            raise self.refuse(f"{name} is {shown(str(value))}: write a finite number of seconds")
        if number < 0:
            raise self.refuse(f"{name} is {value}: a request cannot come before the trace begins, write 0 or more")
        return number

    def tokens(self, row: Mapping[str, Any], name: str, least: int = 1) -> int:
        value = row.get(name)
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not number.is_integer() or isinstance(value, bool) or not least <= number <= MOST_TOKENS:
            text = "missing" if value is None else shown(str(value))
            raise self.refuse(f"{name} is {text}: write a whole number of tokens from {least} to {MOST_TOKENS:,}")
        return int(number)

    def ids(self, row: Mapping[str, Any], name: str) -> list[int]:
        value = row[name]
        if not isinstance(value, list) or not all(isinstance(one, int) and one >= 0 for one in value):
            raise self.refuse(f"{name} is not a list of whole numbers from 0")
        return value


def _own(reader: _Reader, row: Mapping[str, Any]) -> list[SimRequest]:
    at = reader.seconds(row, "arrival_s")
    n_out = reader.tokens(row, "output_len")
    if row.get("prompt_token_ids"):
        ids = reader.ids(row, "prompt_token_ids")
        if row.get("input_len") not in (None, "", len(ids)):
            raise reader.refuse(
                f"input_len is {row['input_len']}, prompt_token_ids has {len(ids)}: leave input_len out"
            )
        return [SimRequest(at, len(ids), n_out, token_ids=ids)]
    n_in, group = reader.tokens(row, "input_len"), row.get("prefix_group")
    if group in (None, ""):
        return [SimRequest(at, n_in, n_out)]
    n_prefix = reader.tokens(row, "prefix_len")
    if n_prefix > n_in:
        raise reader.refuse(f"prefix_len is {n_prefix}, more than the {n_in} tokens of the prompt")
    return [SimRequest(at, n_in, n_out, ((reader.key(str(group)), n_prefix),))]


def _mooncake(reader: _Reader, row: Mapping[str, Any]) -> list[SimRequest]:
    at = reader.seconds(row, "timestamp", 1e-3)
    parts = tuple((reader.key(one), HASH_TOKENS) for one in reader.ids({"hash_ids": [], **row}, "hash_ids"))
    return [SimRequest(at, reader.tokens(row, "input_length"), reader.tokens(row, "output_length"), parts)]


def _azure(reader: _Reader, row: Mapping[str, Any]) -> list[SimRequest]:
    try:
        time = datetime.datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
    except (ValueError, AttributeError):
        raise reader.refuse(f"TIMESTAMP is {shown(str(row['TIMESTAMP']))}: write a date and a time") from None
    at = reader.since_first(time.replace(tzinfo=datetime.UTC).timestamp())
    return [SimRequest(at, reader.tokens(row, "ContextTokens"), max(1, reader.tokens(row, "GeneratedTokens", 0)))]


def _record(reader: _Reader, row: Mapping[str, Any]) -> list[SimRequest]:
    at, n, total = reader.since_first(reader.seconds(row, "at_s")), reader.tokens(row, "n"), row.get("n_output")
    prompts = row.get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(one, dict) for one in prompts):
        raise reader.refuse("prompts is not a list of objects")
    if total == 0:
        return []
    n_out = max(1, round(reader.tokens(row, "n_output") / (n * len(prompts))))
    found = []
    for prompt in prompts:
        marks = reader.ids({"marks": [], **prompt}, "marks")
        parts = tuple((reader.key(mark), MARK_TOKENS) for mark in marks)
        found += [SimRequest(at, reader.tokens(prompt, "length"), n_out, parts, prompt.get("token_ids"))] * n
    return found


FORMS: Final[dict[str, Callable[[_Reader, Mapping[str, Any]], list[SimRequest]]]] = {
    "arrival_s": _own, "timestamp": _mooncake, "TIMESTAMP": _azure, "at_s": _record,
}  # fmt: skip
"""Name of the time → who reads the line."""
COLUMNS: Final = {
    "arrival_s": ("input_len", "output_len"), "timestamp": ("input_length", "output_length"),
    "TIMESTAMP": ("ContextTokens", "GeneratedTokens"),
}  # fmt: skip
"""Name of the time → what a table has beside it."""


def read_trace(path: str) -> tuple[list[SimRequest], list[str]]:
    """(requests in order of arrival, what was done to the file that its owner should know).

    ConfigError for a file that is no trace.
    """
    reader = _Reader(path)
    try:
        content = read_regular(path, MAX_TRACE_BYTES)
    except OSError as error:
        raise ConfigError(f"trace {shown(path)} cannot be read: {error.strerror}") from None
    requests: list[SimRequest] = []
    for row in _rows(reader, content):
        form = next((read for name, read in FORMS.items() if name in row), None)
        if form is None:
            raise reader.refuse(f"there is no time: name it {' or '.join(FORMS)}")
        for request in form(reader, row):
            reader.check_span(request, requests)
            requests.append(request)
    if not requests:
        raise ConfigError(f"trace {shown(path)} has no request")
    notes = []
    if reader.n_early:
        notes = [
            f"{reader.n_early} requests of the trace came before the one above them, the first in line "
            f"{reader.first_early}: it was sorted"
        ]
    requests.sort(key=lambda one: one.arrival_s)
    if requests[0].arrival_s < 0:  # times of a day, counted from a line that was not the first
        first_s = requests[0].arrival_s
        for one in {id(one): one for one in requests}.values():
            one.arrival_s -= first_s
    return requests, notes


def _rows(reader: _Reader, content: bytes) -> Iterator[Mapping[str, Any]]:
    if content.lstrip()[:1] == b"{":
        for reader.line, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    row = msgspec.json.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise reader.refuse(f"not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise reader.refuse("not an object")
                yield row
        return
    if content.lstrip()[:1] == b"[":
        raise ConfigError(f"trace {shown(reader.path)} is a JSON list: write each request as an object on its own line")
    try:
        rows = csv.DictReader(content.decode("utf-8-sig").splitlines(), skipinitialspace=True)
    except UnicodeDecodeError:
        raise ConfigError(f"trace {shown(reader.path)} is neither JSON lines nor CSV in UTF-8") from None
    heads = [name for name in rows.fieldnames or () if name]
    lacking = [name for time, names in COLUMNS.items() if time in heads for name in names if name not in heads]
    if "prompt_token_ids" in heads:
        lacking = [name for name in lacking if name != "input_len"]
    if lacking:
        raise ConfigError(
            f"trace {shown(reader.path)}: the header lacks {', '.join(lacking)}; it has {shown(', '.join(heads))}"
        )
    for row in _lines(reader, rows):
        reader.line = rows.line_num
        if None in row or None in row.values():
            raise reader.refuse("it has not as many values as the first line has names")
        yield row


def _lines(reader: _Reader, rows: csv.DictReader[str]) -> Iterator[dict[str, Any]]:
    """With an error that names the line."""
    try:
        yield from rows
    except csv.Error as error:
        reader.line = rows.line_num
        raise reader.refuse(f"not CSV: {error}") from None
