"""decode.cu on host threads in place of the launcher's libraries."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import subprocess

import pytest
import torch

from quire.kernels import jit
from quire.kernels.attention.hopper import hooks, launcher

EMULATED = pathlib.Path(__file__).resolve().parents[2] / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-pthread", "-x", "c++")


def emulate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    """Until the patch is undone. tmp_path: for sources and libraries."""
    folder = tmp_path / "cuda"
    shutil.copytree(jit.sources_folder() / "cuda", folder)
    for header in EMULATED.glob("*.h"):
        shutil.copy(header, folder)
    (folder / "cuda_runtime.h").touch()
    shape = folder / "decode" / "shape.h"
    declared = "extern __shared__ char raw[];"
    assert declared in shape.read_text()
    shape.write_text(shape.read_text().replace(declared, "char* raw = emulated::memory;"))

    @functools.cache
    def library(build: launcher.Build) -> ctypes.CDLL:
        made = tmp_path / f"{abs(hash(build))}.so"
        variant = made.with_suffix(".h")
        variant.write_text(hooks.header(build.program))
        macros = [f"-DQUIRE_{name}={value}" for name, value in launcher.macros(build).items()]
        command = [
            compiler, *FLAGS, f"-I{folder}", *macros, "-include", str(folder / "fragments.h"),
            "-include", str(variant), str(folder / build.source), "-o", str(made),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return ctypes.CDLL(str(made))

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(launcher, "library", library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
