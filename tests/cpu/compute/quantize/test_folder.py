"""What is left of a folder whose writer was ended, and what the next writer makes of it."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
import torch

from quire.cli.interrupt import terminated_tidily
from quire.compute.quantize.folder import Folder


def test_sigterm_leaves_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, terminated_tidily(), Folder(tmp_path / "out", 1) as folder:
        folder.add({"weight": torch.zeros(2)})
        assert [path.name for path in tmp_path.iterdir()] == [f".out.partial-{os.getpid()}"]
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and "quire: terminated" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_weights_may_be_read_by_whom_the_umask_lets(tmp_path: pathlib.Path, umask: int) -> None:
    """The library leaves them as it made them, for their owner alone."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    before = os.umask(umask)
    try:
        with Folder(tmp_path / "out", 1) as folder:
            folder.add({"weight": torch.zeros(2)})
            folder.finish(source, None)
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 3 and set(modes.values()) == {0o666 & ~umask}, modes


def test_the_next_run_removes_what_the_dead_left(tmp_path: pathlib.Path) -> None:
    with Folder(tmp_path / "out", 1):
        ours = tmp_path / f".out.partial-{os.getpid()}"
        live = ours.rename(tmp_path / ".out.partial-7")  # as if another process were writing it
        others = [tmp_path / ".other.partial-9", tmp_path / ".out.partial-mine", live]
        for name in (".out.partial-8", ".other.partial-9", ".out.partial-mine"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model-00001-of-00002.safetensors").touch()
        (tmp_path / f".out.partial-{os.getpid()}").mkdir()  # in another container numbers begin again
        with Folder(tmp_path / "out", 1):
            assert sorted(tmp_path.iterdir()) == sorted([*others, ours])
