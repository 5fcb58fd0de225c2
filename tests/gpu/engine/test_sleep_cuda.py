"""Sleep on a GPU: its memory comes back at each level, and after waking the same prompts have the same tokens."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import quire

pytestmark = pytest.mark.gpu
CUBLAS_WORKSPACE = 33 << 20
"""Bytes, for each thread that multiplies: waking may be another one than building."""
SLEEPER = pathlib.Path(__file__).parent / "sleeper.py"


@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_memory_comes_back_and_so_do_the_tokens(checkpoint: pathlib.Path, way: str) -> None:
    root = str(pathlib.Path(quire.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, str(SLEEPER), str(checkpoint), way],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    first, *others = found["tokens"]
    assert any(first) and all(tokens == first for tokens in others)
    awake, *woken = found["awake"]
    assert awake > 1 << 20
    assert all(n_bytes <= awake * 0.01 for n_bytes in found["asleep"]), found
    assert max(woken) - min(woken) <= awake * 0.01, found
    assert awake * 0.99 <= min(woken) <= awake * 1.01 + CUBLAS_WORKSPACE, found
