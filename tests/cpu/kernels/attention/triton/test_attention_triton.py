"""The Triton kernels of attention without a GPU: their results in Triton's interpreter, and that they compile."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[4]


def run(script: str, **variables: str) -> str:
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE.parents[1])))}
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stdout.strip() or done.stderr[-3000:]


def test_kernels_equal_formulas_by_hand_in_the_interpreter(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    assert run("interpreted_attention.py", TRITON_INTERPRET="1", QUIRE_CACHE_DIR=str(tmp_path)) == "fine"


def test_kernels_compile_for_hopper(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "QUIRE_CACHE_DIR": str(tmp_path)}
    assert run("compiled_attention.py", TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1", **caches) == "fine"
