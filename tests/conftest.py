"""Shared by all tests: GPU tests are skipped where no GPU is, and torch keeps to one thread."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0:
        return
    for item in items:
        if item.get_closest_marker("gpu") or "gpu" in pathlib.Path(item.fspath).parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
