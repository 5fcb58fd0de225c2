"""What a wheel has beside modules: every other file that is kept in the package's folder."""

from __future__ import annotations

import pathlib
import subprocess
import tomllib

import pytest

from quire.core.version import __version__

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "quire"


def test_all_files_of_the_package_are_installed() -> None:
    """Else an installed one lacks what a checkout has."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "quire"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("needs a checkout")
    kept = {ROOT / name for name in listed.stdout.split("\0") if name and not name.endswith((".py", ".pyi"))}
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["quire"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert (PACKAGE / "planner" / "calibrations" / "h200.json") in kept
    assert {str(path.relative_to(ROOT)) for path in kept - installed if path.exists()} == set()


def test_the_package_says_the_version_that_it_is_published_as() -> None:
    """Nodes compare it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
