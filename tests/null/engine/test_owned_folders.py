"""A folder ends with its owner: by itself, or by the next process that makes one; nobody else's is touched."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from quire.core.errors import ConfigError
from quire.engine import owned_folders, wire
from quire.engine.owned_folders import LOCK, OwnedFolder

OWNER = """
import sys, time
from quire.engine.owned_folders import OwnedFolder
folder = OwnedFolder("quire-", sys.argv[1])
print(folder.path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_owner_left_goes_and_what_others_have_stays(tmp_path: pathlib.Path) -> None:
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        paths = [pathlib.Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
        (paths[0] / "meet").write_text("there")
        (tmp_path / "quire-without-a-lock").mkdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / LOCK).touch()
        (tmp_path / "quire-link").symlink_to(elsewhere)
        own = OwnedFolder("quire-", str(tmp_path))
        assert all(path.is_dir() for path in paths), "their owners live"
        os.kill(owners[0].pid, signal.SIGKILL)
        owners[0].wait()
        second = OwnedFolder("quire-", str(tmp_path))
        assert not paths[0].exists() and paths[1].is_dir() and own.path.is_dir()
        assert (tmp_path / "quire-without-a-lock").is_dir() and (elsewhere / LOCK).is_file()
        assert own.path.stat().st_mode & 0o777 == 0o700
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()
    for folder in (own, second, own):
        folder.remove()
    assert not own.path.exists() and not second.path.exists()


def test_a_folder_without_its_lock_is_not_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: pathlib.Path) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owned_folders, "_locked", fail)
    monkeypatch.setattr(wire.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(wire, "OTHER_PLACES", ())
    with pytest.raises(ConfigError, match="No space left on device"):
        wire.socket_folder()
    assert not list(tmp_path.iterdir())
