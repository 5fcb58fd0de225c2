"""Opening files that somebody else names: never waits for another process, and says in words what is wrong.

Opening a pipe (FIFO) waits until somebody opens its other end, which may be for ever: what is read must be a regular
file, and a pipe that is written must have a reader. Anything else is an OSError; its `strerror` is a reason for people.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from quire.core.errors import ConfigError, shown

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, to be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _irregular(path, os.stat(path).st_mode) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(path, mode)
    return descriptor


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(min(max_bytes, os.fstat(file.fileno()).st_size) + 1)  # a buffer of this size is made
        content += file.read() if len(content) <= max_bytes else b""
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes, the limit for this file", os.fspath(path))
    return content


def check_regular(path: str | os.PathLike[str]) -> None:
    """For a file that a library opens: OSError if something is there that is no regular file."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)


def open_output(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """A descriptor for writing, with `flags` beside O_WRONLY. A pipe must have a reader."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, mode)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            raise OSError(errno.ENXIO, "it is a pipe that nobody reads", os.fspath(path)) from None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def new_file_mode() -> int:
    """Permissions of a file that `open` makes: those of the umask. One that was a temporary file has 0600."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Make `text` the content of a file, in UTF-8."""
    with os.fdopen(open_output(path, os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(text)


def check_output(path: str, flag: str) -> None:
    """ConfigError, before hours of work, if it is plain that `path`, the value of `flag`, cannot be written."""
    place = Path(path).absolute()
    if not place.parent.is_dir():
        raise ConfigError(f"{flag} {shown(path)}: the folder does not exist")
    if place.is_dir():
        raise ConfigError(f"{flag} {shown(path)} is a folder: give the name of a file")
    if place.is_fifo():
        raise ConfigError(f"{flag} {shown(path)} is a pipe: give the name of a file")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ConfigError(f"{flag} {shown(path)} cannot be written: permission denied")


def _irregular(path: str | os.PathLike[str], mode: int) -> OSError:
    kind = next((name for test, name in _KINDS if test(mode)), "something else")
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
