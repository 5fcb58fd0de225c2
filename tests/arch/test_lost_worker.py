"""A test that crashes its process has failed, and all others run."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

PLUGIN = pathlib.Path(__file__).parents[1] / "lost_worker.py"
FINE = "def test_fine():\n    pass\n"
CRASH = "def test_crash():\n    import os\n    os.abort()\n"


@pytest.mark.parametrize("sources, n_passed", [
    ({"test_a.py": CRASH}, 0),
    ({"test_a.py": FINE + CRASH, "test_b.py": FINE}, 2),
    ({"test_a.py": CRASH + FINE, **{f"test_b{i}.py": FINE for i in range(9)}}, 10),
    ({**{f"test_a{i}.py": FINE for i in range(5)}, "test_b.py": FINE + CRASH}, 6),
    ({f"test_a{i}.py": FINE + CRASH + FINE.replace("fine", "good") for i in range(4)}, 8),
])  # fmt: skip
@pytest.mark.parametrize("n_processes", [1, 3])
def test_all_others_run(tmp_path: pathlib.Path, n_processes: int, sources: dict[str, str], n_passed: int) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN.read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-n", str(n_processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    n_crashed = sum(source.count("abort") for source in sources.values())
    assert re.search(rf"= {n_crashed} failed(, {n_passed} passed)? in", done.stdout), done.stdout
    assert ("passed" in done.stdout.splitlines()[-1]) == (n_passed > 0)
    assert done.stdout.count("crashed while running 'test_") == 2 * n_crashed, "in its report and at the end"
