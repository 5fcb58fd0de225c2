"""The kernels of latent attention for Hopper, emulated on host threads: attention to lines, and what is around it."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from quire.kernels import jit
from quire.kernels.attention.hopper import latent
from quire.kernels.mla import hopper

EMULATED = pathlib.Path(__file__).resolve().parents[1] / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-pthread", "-x", "c++")
SHARED = {
    "latent/shape.h": ("extern __shared__ char raw[];", "char* raw = emulated::memory;"),
    "latent/values.h": ("extern __shared__ __align__(16) char shared[];", "char* shared = emulated::memory;"),
    "latent_rows.cu": ("extern __shared__ __align__(16) char shared[];", "char* shared = emulated::memory;"),
}
"""Source: its declaration of shared memory, and what stands for it."""


def emulate(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of the kernels are those of an emulation, compiled in an empty folder."""
    compiler = jit.compiler("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    sources = folder / "cuda"
    shutil.copytree(jit.sources_folder() / "cuda", sources)
    for header in EMULATED.glob("*.h"):
        shutil.copy(header, sources)
    (sources / "cuda_runtime.h").touch()
    for name, (declared, emulated) in SHARED.items():
        text = (sources / name).read_text()
        assert declared in text
        (sources / name).write_text(text.replace(declared, emulated))

    def compiled(source: str, *flags: str) -> ctypes.CDLL:
        made = folder / f"{source}{abs(hash(flags))}.so"
        command = [compiler, *FLAGS, f"-I{sources}", *flags, str(sources / source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return ctypes.CDLL(str(made))

    @functools.cache
    def lines(dtype: torch.dtype, rows: int) -> ctypes.CDLL:
        included = [flag for name in ("wgmma.h", "plain_variant.h") for flag in ("-include", str(sources / name))]
        return compiled("latent.cu", *hopper.definitions(dtype), f"-DQUIRE_ROWS={rows}", *included)

    @functools.cache
    def around(dtype: torch.dtype) -> ctypes.CDLL:
        return compiled("latent_rows.cu", *hopper.definitions(dtype), "-include", str(sources / "gemm.h"))

    monkeypatch.setattr(latent, "_library", lines)
    monkeypatch.setattr(hopper, "library", around)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
