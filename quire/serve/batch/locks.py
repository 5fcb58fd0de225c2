"""Locks that end with their process, however it ends: files under flock. Owns them; does not own what they guard.

Invariants: a lock that was taken is on the file that is at its path; only a lock that nobody holds is dead.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import secrets


class FileLock:
    """A lock that this process holds until `release`."""

    def __init__(self, path: pathlib.Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, path: pathlib.Path, *, creates: bool = True) -> FileLock | None:
        """None if another holds it. OSError when the disk refuses, FileNotFoundError if there is none and it is not to
        be made."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if creates else 0), 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    lock, fd = cls(path, fd), -1
                    return lock
            except BlockingIOError:
                return None
            except FileNotFoundError:
                pass  # removed between open and flock: what was locked is nobody's
            finally:
                if fd >= 0:
                    os.close(fd)

    def release(self, *, remove: bool = False) -> None:
        """Let another have it, if that was not done yet; `remove`: nobody will want it again."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if remove:
                self._path.unlink(missing_ok=True)
        finally:
            os.close(fd)


class Holder:
    """This process, as others may see it: a lock under a name that nobody used before."""

    def __init__(self, folder: pathlib.Path) -> None:
        """OSError when the disk refuses."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.name = secrets.token_hex(12)
        lock = FileLock.take(folder / self.name)
        if lock is None:
            raise OSError(f"{folder / self.name} is locked by another")
        self._lock = lock

    def close(self) -> None:
        """It is gone."""
        self._lock.release(remove=True)


def is_dead(folder: pathlib.Path, name: str) -> bool:
    """True if the holder of this name is gone. Its file goes too. OSError when the disk refuses."""
    try:
        lock = FileLock.take(folder / name, creates=False)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    lock.release(remove=True)
    return True
