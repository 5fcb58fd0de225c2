"""What the kernel says of a process that does not speak for itself. Linux's /proc alone; owns nothing."""

from __future__ import annotations

import pathlib


def is_stopped(pid: int) -> bool:
    """True if somebody has stopped it with a signal, as a debugger does."""
    return _state(pid) in ("T", "t")


def state_words(pid: int) -> str:
    """Why it cannot answer, as far as the kernel knows: stopped, or within a call that no signal ends. Else empty."""
    match _state(pid):
        case "T":
            return "stopped by a signal"
        case "t":
            return "stopped by a debugger"
        case "D":
            place = _read(pid, "wchan")
            return f"waiting in the kernel{f', in {place}' if place.strip('0') else ''}"
    return ""


def _state(pid: int) -> str:
    """Of proc(5), one letter; empty if it is gone."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return fields[0] if fields else ""


def _read(pid: int, name: str) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
