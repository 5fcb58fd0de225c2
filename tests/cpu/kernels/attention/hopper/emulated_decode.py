"""decode.cu on the host in place of the launcher's libraries."""

from __future__ import annotations

import ctypes
import functools
import pathlib

import pytest
import torch
from emulation import emulated_library, emulated_sources, share_memory

from quire.kernels.attention.hopper import hooks, launcher


def emulate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone. tmp_path: for sources and libraries. Skips the test without a compiler."""
    folder = emulated_sources(tmp_path)
    share_memory(folder / "decode" / "shape.h", "extern __shared__ char raw[];", "raw")

    @functools.cache
    def library(build: launcher.Build) -> ctypes.CDLL:
        name = str(abs(hash(build)))
        variant = tmp_path / f"{name}.h"
        variant.write_text(hooks.header(build.program))
        macros = [f"-DQUIRE_{macro}={value}" for macro, value in launcher.macros(build).items()]
        included = ["-include", str(folder / "fragments.h"), "-include", str(variant)]
        return emulated_library(folder / build.source, name, *macros, *included)

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(launcher, "library", library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
