"""Writes captured steps as a Chrome trace (chrome://tracing, ui.perfetto.dev): a row for the host, one for the device.

Trace Event Format (Google, 2016): complete events `X` with `ts` and `dur` in microseconds. Both rows count from the
first event. Invariant: events of a row do not overlap, which viewers could not draw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from quire.bench.breakdown import Capture, kind_of, phases
from quire.core.errors import ConfigError, shown
from quire.core.files import check_output, write_output

HOST, DEVICE = 1, 2
"""Thread numbers of the two rows."""


def check_trace_path(path: str) -> None:
    """ConfigError, before anything is loaded, for a path that cannot be written."""
    check_output(path, "--profile")


def write_trace(path: str, captures: Sequence[Capture], title: str) -> None:
    """Write all captures, one after another on the same clock."""
    events = [event for capture in captures for event in (*_host_events(capture), *_device_events(capture))]
    origin_us = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = round(event["ts"] - origin_us, 3)
    labels = [_label("process_name", 0, title), _label("thread_name", HOST, "host"),
              _label("thread_name", DEVICE, "device")]  # fmt: skip
    document = {"displayTimeUnit": "ms", "traceEvents": labels + events}
    try:
        write_output(path, json.dumps(document))
    except OSError as error:
        raise ConfigError(f"--profile {shown(path)} cannot be written: {error.strerror}") from None


def _host_events(capture: Capture) -> Iterator[dict[str, Any]]:
    """Phases that touch the window, named after their step."""
    for record in capture.records:
        for name, start_s, end_s in phases(record.times):
            if end_s > capture.begin_s and start_s < capture.end_s:
                words = f"{name} {record.step}: {record.n_tokens} tokens"
                details = {"step": record.step, "tokens": record.n_tokens, "prefill": record.n_prefill_tokens,
                           "sequences": record.n_spans}  # fmt: skip
                yield _event(HOST, words, name, start_s, end_s - start_s, details)


def _device_events(capture: Capture) -> Iterator[dict[str, Any]]:
    """Kernels that touch the window. What runs beside an earlier one is drawn from that one's end on, if at all."""
    drawn_s = float("-inf")
    for kernel in capture.kernels:
        if kernel.end_s <= capture.begin_s or kernel.start_s >= capture.end_s:
            continue
        start_s = max(kernel.start_s, drawn_s)
        drawn_s = max(drawn_s, kernel.end_s)
        kind = kind_of(kernel.name)
        details = {"kind": kind, "took_us": round(1e6 * (kernel.end_s - kernel.start_s), 3)}
        yield _event(DEVICE, kernel.name, kind, start_s, drawn_s - start_s, details)


def _event(row: int, name: str, kind: str, start_s: float, seconds: float, details: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": 1e6 * start_s, "dur": round(1e6 * seconds, 3)}
    return {"ph": "X", "pid": 1, "tid": row, "name": name, "cat": kind, **times, "args": details}


def _label(kind: str, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": kind, "args": {"name": text}}
