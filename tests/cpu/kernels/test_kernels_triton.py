"""The CUDA kernels without a GPU: their results in Triton's interpreter, and that they compile for Hopper."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def run(script: str, **variables: str) -> str:
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stdout.strip() or done.stderr[-3000:]


def test_kernels_equal_the_references_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run("interpreted.py", TRITON_INTERPRET="1") == "fine"


def test_kernels_compile_for_hopper(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    assert (
        run("compiled.py", TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1", TRITON_CACHE_DIR=str(tmp_path)) == "fine"
    )
