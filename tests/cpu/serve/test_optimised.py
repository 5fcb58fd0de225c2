"""Keys, validation and the scheduler's refusals hold under `python -O`, which removes every assert."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("optimised.py")


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    root = SCRIPT.parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, *flags, str(SCRIPT)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)


def test_guards_hold_without_asserts() -> None:
    done = run("-O")
    assert done.returncode == 0, done.stdout + done.stderr
    n_passed, _, n_checks, *_ = done.stdout.split()
    assert n_passed == n_checks and int(n_checks) > 50


def test_the_script_can_fail() -> None:
    """Without -O its first check does."""
    done = run()
    assert done.returncode == 1 and done.stdout.startswith("python runs with -O\n"), done.stdout + done.stderr
