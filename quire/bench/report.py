"""A measurement as a JSON file that says how it was made: commit, hardware, command, configuration, results.

Every benchmark writes through here. Invariant: no secret gets into a report, and NaN becomes null.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quire import __version__
from quire.bench.machine import commit, hardware
from quire.bench.timeline import Timeline
from quire.core.errors import ConfigError, shown
from quire.core.files import check_output, write_output

SECRET_WORDS = ("key", "token", "password", "secret")
"""Last words of option names whose values are never written down."""
MAX_ROWS = 2_000
"""Rows of a timeline that a report keeps."""


def build_report(
    benchmark: str,
    config: Mapping[str, object],
    results: Mapping[str, object],
    timeline: Timeline | None = None,
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The report as plain values. `argv` defaults to the process's command line."""
    report: dict[str, Any] = {
        "benchmark": benchmark,
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quire": __version__,
        "commit": commit(),
        "hardware": hardware(),
        "command": command_line(sys.argv if argv is None else argv),
        "config": {name: value for name, value in config.items() if not is_secret(name)},
        "results": results,
    }
    if timeline is not None:
        report["timeline"] = {"unit": timeline.unit, **timeline.from_zero().thinned(MAX_ROWS).columns()}
    return {name: plain(value) for name, value in report.items()}


def write_report(path: str, report: Mapping[str, Any]) -> None:
    """Write a report as indented JSON, a list of numbers on one line. ConfigError if the file cannot be written."""
    try:
        write_output(path, _indented(report) + "\n")
    except OSError as error:
        raise ConfigError(f"report {shown(path)} cannot be written: {error.strerror}") from None


def check_report_path(path: str, flag: str = "--output-json") -> None:
    """ConfigError, before anything is measured, if it is plain that the report cannot be written."""
    check_output(path, flag)


def is_secret(name: str) -> bool:
    """True for names of options whose value must not be written down."""
    return name.lower().rpartition("_")[2] in SECRET_WORDS


def command_line(argv: Sequence[str]) -> str:
    """The command as one could type it again: the program's name without its folder, values of secrets starred."""
    program = pathlib.Path(argv[0]).name.replace("__main__.py", "quire") if argv else ""
    words = [program, *argv[1:]]
    hidden = False
    shown_words = []
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("--") and is_secret(name[2:].replace("-", "_"))
        shown_words.append("***" if hidden else f"{name}=***" if secret and equals else word)
        hidden = secret and not equals
    return shlex.join(shown_words)


def plain(value: Any) -> Any:
    """Builtin values only; a float that JSON cannot carry becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _indented(value: Any, margin: str = "") -> str:
    """JSON with a line for each entry of an object or of a list of objects; other lists stay on one line."""
    inner = margin + "  "
    if isinstance(value, Mapping) and value:
        rows = [f"{inner}{json.dumps(key)}: {_indented(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{margin}}}"
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "[\n" + ",\n".join(inner + _indented(item, inner) for item in value) + f"\n{margin}]"
    return json.dumps(value, allow_nan=False)
