"""Kernels in CUDA C++ on host threads: a C++ compiler takes their sources beside stand-ins for what needs a GPU."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import pytest

from quire.kernels import jit

STAND_INS = pathlib.Path(__file__).resolve().parent / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-pthread", "-x", "c++")
EXACT = ("-ffp-contract=off",)
"""Of sums that are compared bit by bit."""


def emulated_sources(folder: pathlib.Path) -> pathlib.Path:
    """`csrc/cuda` with its stand-ins, in a new folder of this one. Skips the test without a compiler."""
    if jit.compiler("c++") is None:
        pytest.skip("needs a C++ compiler")
    made = folder / "cuda"
    shutil.copytree(jit.sources_folder() / "cuda", made)
    shutil.copytree(STAND_INS, made, dirs_exist_ok=True)
    (made / "cuda_runtime.h").touch()
    return made


def share_memory(source: pathlib.Path, declared: str, name: str) -> None:
    """Have what a source declares as shared memory be that of the emulated block."""
    text = source.read_text()
    assert declared in text
    source.write_text(text.replace(declared, f"char* {name} = emulated::memory;"))


def emulated_library(source: pathlib.Path, name: str, *options: str) -> ctypes.CDLL:
    """A source of such a folder, compiled with these options under a name of its own."""
    compiler, made = jit.compiler("c++"), source.parent / f"{name}.so"
    assert compiler is not None
    command = [compiler, *FLAGS, *options, f"-I{source.parent}", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(made))
