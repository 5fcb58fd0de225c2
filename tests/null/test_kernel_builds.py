"""setup.py compiles a library once for the same sources, headers, flags and compiler, and again when one differs."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = sorted(path.stem for path in (ROOT / "csrc/cpu").glob("*.cpp"))


class Checkout:
    """A copy of setup.py with sources of one line, and a compiler that counts its calls."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.sources = folder / "csrc/cpu"
        self.sources.mkdir(parents=True)
        shutil.copy(ROOT / "setup.py", folder)
        tables = ('[project]\nname = "quire"\nversion = "0"', '[tool.setuptools]\npackages = ["quire"]\n')
        (folder / "pyproject.toml").write_text("\n".join(tables))
        (folder / "quire").mkdir()
        (folder / "quire/__init__.py").touch()
        self.write("")
        for name in SOURCES:
            (self.sources / f"{name}.cpp").write_text(f'#include "one.h"\nint {name}() {{ return ONE; }}\n')
        (self.sources / "quire_cpu.h").touch()
        self.header("1")
        self.use("c++")

    def write(self, flag: str) -> None:
        levels = {"portable": [flag] if flag else []}
        (self.sources / "build.json").write_text(json.dumps({"flags": ["-fPIC"], "warnings": [], "levels": levels}))

    def header(self, value: str) -> None:
        (self.sources / "one.h").write_text(f"#define ONE {value}\n")

    def use(self, compiler: str, words: str = "") -> None:
        """`words`: what the compiler says besides of itself."""
        path = self.folder / "counting"
        path.write_text(f'#!/bin/sh\necho "{words}" >&2\necho call "$@" >>{self.calls}\nexec {compiler} "$@"\n')
        path.chmod(0o755)

    def build(self) -> tuple[int, bytes]:
        """(sources compiled, the library's bytes)"""
        shutil.rmtree(self.folder / "quire/kernels", ignore_errors=True)
        self.calls.write_text("")
        environment = os.environ | {"CC": str(self.folder / "counting"), "CXX": str(self.folder / "counting")}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        n_compiled = sum(".cpp" in line for line in self.calls.read_text().splitlines())
        return n_compiled, (self.folder / "quire/kernels/_native/libquire_portable.so").read_bytes()


def test_a_library_is_compiled_once_for_the_same_content(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("setuptools")
    if sys.platform != "linux" or shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    checkout = Checkout(tmp_path)
    n_compiled, first = checkout.build()
    assert n_compiled == len(SOURCES)
    (checkout.sources / "tape.cpp").touch()
    assert checkout.build() == (0, first)
    checkout.header("2")
    n_compiled, second = checkout.build()
    assert n_compiled == len(SOURCES) and second != first
    checkout.write("-DANOTHER_FLAG")
    assert checkout.build()[0] == len(SOURCES)
    checkout.use("c++", "another version")
    assert checkout.build()[0] == len(SOURCES)
    assert len(list((tmp_path / "build/kernels").iterdir())) == 1, "older libraries stay"
