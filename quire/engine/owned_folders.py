"""Folders for sockets and meetings, which the next process to make one removes if their owner could not.

Owns the lock by which the living are told from the dead: the system lets go of it with the process, however that ends,
and numbers of processes, which mean nothing in another container, are not asked.
Invariant: the folder of a living owner is never removed, nor one that has no lock or belongs to another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import weakref

LOCK = "lock"
"""Its name in the folder."""


class OwnedFolder:
    """A fresh folder with mode 0700, there until `remove` or the end of this object."""

    def __init__(self, prefix: str, place: str | pathlib.Path | None = None) -> None:
        """place: None: the usual one for temporary files. Removes others of the prefix whose owners are dead. OSError:
        there is no room for it."""
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        remove_left(prefix, self.path.parent)
        try:
            fd = _locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self.remove = weakref.finalize(self, _remove, self.path, fd)
        """A second call does nothing."""


def _locked(folder: pathlib.Path) -> int:
    """A descriptor that holds the folder's lock, whose file has its name only once it is locked; -1 where the file
    system has no locks."""
    new = folder / f"{LOCK}.new"
    fd = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        new.unlink()
        return -1
    new.rename(folder / LOCK)
    return fd


def _remove(folder: pathlib.Path, fd: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if fd >= 0:
        os.close(fd)


def remove_left(prefix: str, place: pathlib.Path) -> None:
    """Remove this user's folders there whose owners are dead."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, another one removes it, or its owner lives
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
