"""Errors of the system that mean that a limit is reached or a place is bad, in words: memory, open files, disks.

Owns the wording. Does not own who catches them: every entry point of a process does, so that nobody is shown a
traceback for a full disk.
"""

from __future__ import annotations

import errno
import os

_HINTS = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the system has no file descriptors left",
    errno.ENOMEM: "free memory, or raise the limit on it (ulimit -v)",
    errno.EAGAIN: "raise the limit on processes and threads (ulimit -u)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Where no file is named, it is a standard one."""
_OUT_OF_THREADS = "can't start new thread"
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation")


def shortage(error: BaseException) -> str | None:
    """One line about an error that is no fault of Quire's; None for any other."""
    if isinstance(error, MemoryError):
        return f"memory ran out: {_HINTS[errno.ENOMEM]}"
    if isinstance(error, ImportError):
        return f"a library cannot be loaded: {error}"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        where = f"{os.fspath(error.filename)!r}: " if isinstance(error.filename, str | bytes | os.PathLike) else ""
        if not where and error.errno in _WRITING:
            where = "the output cannot be written: "
        hint = _HINTS.get(error.errno or 0)
        return f"{where}{reason}{f': {hint}' if hint else ''}"
    if isinstance(error, RuntimeError):
        if _OUT_OF_THREADS in str(error):
            return f"no thread can be started: {_HINTS[errno.EAGAIN]}, or on memory (ulimit -v)"
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            return f"memory ran out: {_HINTS[errno.ENOMEM]}"
    return None
