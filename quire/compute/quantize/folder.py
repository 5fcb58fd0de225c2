"""The folder that is written: shards, their index, the files beside them, config.json last.

Owns when there is a folder: it is made beside its place under another name, and gets its own when it is whole.
Invariant: whatever ends the work before, nothing is left; after a kill a hidden folder without config.json, which the
next folder of that name removes. Whose process lives is told by a lock: a number may be that of another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from quire.compute.weights.checkpoint import INDEX
from quire.compute.weights.hub import WANTED
from quire.core.errors import ConfigError, shown
from quire.core.files import new_file_mode
from quire.core.units import format_bytes

BESIDE: Final = tuple(name for name in WANTED if name != "*.safetensors")
CONFIG: Final = "config.json"


def check_target(target: pathlib.Path) -> None:
    """ConfigError, before hours of work, where no folder can be made."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        what = "is a link" if target.is_symlink() else "is not a folder"
        raise ConfigError(f"OUTDIR {shown(str(target))} {what}: give the name of a new folder")
    if target.is_dir() and target.samefile("."):  # a folder is put in its place, and the shell is left in the old one
        raise ConfigError(f"OUTDIR {shown(str(target))} is the current folder: give the name of a new folder")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"OUTDIR {shown(str(target))} is not empty: give the name of a new folder, or empty it first")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"OUTDIR {shown(str(target))} cannot be made: {parent} is not a folder")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"OUTDIR {shown(str(target))} cannot be made: {parent} cannot be written")


def _remove_abandoned(target: pathlib.Path) -> None:
    """Remove what killed processes left of this folder; the kernel has dropped their locks."""
    name = re.compile(re.escape(f".{target.name}.partial-") + "[0-9]+")
    beside: list[pathlib.Path] = []
    with contextlib.suppress(OSError):  # it may be written and not read
        beside.extend(target.parent.iterdir())
    for path in beside:
        if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):  # locked, not ours, or gone meanwhile
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


class Folder:
    """A context: left by an error, Ctrl-C or SIGTERM (`cli/interrupt.py`), there is no folder."""

    def __init__(self, target: pathlib.Path, n_shards: int, n_bytes: int = 0) -> None:
        """n_bytes: of all tensors; ConfigError where there is no room for them."""
        check_target(target)
        self._target = target.absolute()
        self._partial = self._target.with_name(f".{target.name}.partial-{os.getpid()}")
        self._n_shards = n_shards
        self._homes: dict[str, str] = {}
        self._n_bytes = 0
        self._n_written = 0
        self._lock = -1
        _remove_abandoned(self._target)
        self._check_room(self._target, n_bytes)

    def __enter__(self) -> Folder:
        self._partial.mkdir()
        self._lock = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: there, nobody takes it for abandoned either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        os.close(self._lock)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the next shard."""
        self._n_written += 1
        name = f"model-{self._n_written:05}-of-{self._n_shards:05}.safetensors"
        n_bytes = sum(one.nbytes for one in tensors.values())
        with self._writing(self._target / name, n_bytes):
            save_file({key: one.contiguous() for key, one in tensors.items()}, self._partial / name, {"format": "pt"})
            (self._partial / name).chmod(new_file_mode())
        self._homes |= dict.fromkeys(tensors, name)
        self._n_bytes += n_bytes

    def finish(self, source: pathlib.Path, quantization: Mapping[str, Any] | None) -> int:
        """Write all else and give the folder its name; returns bytes of tensors. source: of config.json and what stands
        beside it. quantization: what config.json says of it; None: nothing."""
        index = {"metadata": {"total_size": self._n_bytes}, "weight_map": self._homes}
        config = json.loads((source / CONFIG).read_text())
        config |= {} if quantization is None else {"quantization_config": quantization}
        beside = [path for pattern in BESIDE for path in source.glob(pattern) if path.is_file()]
        with self._writing(self._target / CONFIG, sum(path.stat().st_size for path in beside)):
            (self._partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
            for path in beside:
                if path.name not in (CONFIG, INDEX):
                    shutil.copyfile(path, self._partial / path.name)
            (self._partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            os.rename(self._partial, self._target)  # in the place of an empty folder too
        return self._n_bytes

    @contextlib.contextmanager
    def _writing(self, path: pathlib.Path, n_bytes: int) -> Iterator[None]:
        """ConfigError where a file, and what stands beside it, cannot be written. path: as it will be called."""
        self._check_room(path, n_bytes)
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise self._failure(path, n_bytes, getattr(error, "strerror", None) or str(error)) from None

    def _check_room(self, path: pathlib.Path, n_bytes: int) -> None:
        if shutil.disk_usage(self._target.parent).free < n_bytes:
            raise self._failure(path, n_bytes, "the disk is full")

    def _failure(self, path: pathlib.Path, n_bytes: int, reason: str) -> ConfigError:
        free = shutil.disk_usage(self._target.parent).free
        return ConfigError(
            f"{path} cannot be written: it takes {format_bytes(n_bytes)}, and {format_bytes(free)} are free in"
            f" {self._target.parent} ({reason}). Nothing is left of it: make room, or take an OUTDIR on another disk"
        )
