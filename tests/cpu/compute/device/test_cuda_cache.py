"""Kernels that Triton compiles go to Quire's cache folder, in processes that serve on a GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

START = """
import pathlib, sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda device: None
torch.cuda.graph_pool_handle = lambda: None
from quire.compute.device.cuda import CudaDevice
CudaDevice()
import triton
print(triton.knobs.cache.dir)
"""


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"QUIRE_CACHE_DIR": "/tmp/quire-kernels"}, "/tmp/quire-kernels/triton"),
        ({"HOME": "/tmp/somebody"}, "/tmp/somebody/.cache/quire/triton"),
        ({"QUIRE_CACHE_DIR": "/tmp/quire-kernels", "TRITON_CACHE_DIR": "/tmp/mine"}, "/tmp/mine"),
    ],
    ids=["chosen", "default", "the user's own goes first"],
)
def test_triton_keeps_its_kernels_in_quires_folder(variables: dict[str, str], found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", **variables},
        cwd=pathlib.Path(__file__).parents[4],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == found
