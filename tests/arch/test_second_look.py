"""The second look at failed tests: what passes alone is named, what fails again has failed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

PLUGIN = pathlib.Path(__file__).parents[1] / "second_look.py"
RACE = """
import pathlib
def test_race():
    mark = pathlib.Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen
def test_fine():
    pass
"""
BAD = "def test_bad():\n    raise ValueError\n"


@pytest.mark.parametrize("sources, most, code, says", [
    ({"test_a.py": RACE}, 2, 0, "passed alone, mend it: test_a.py::test_race"),
    ({"test_a.py": RACE, "test_b.py": BAD}, 2, 1, "a second look at 2 of them"),
    ({"test_a.py": RACE, "test_b.py": BAD}, 1, 1, "2 failed, 1 passed"),
    ({"test_a.py": RACE}, 0, 1, "1 failed, 1 passed"),
    ({"test_a.py": "import nothing_like_it\n"}, 2, 2, "1 error"),
])  # fmt: skip
@pytest.mark.parametrize("n_processes", ["0", "2"])
def test_second_look(
    tmp_path: pathlib.Path, n_processes: str, sources: dict[str, str], most: int, code: int, says: str
) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN.read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-n", n_processes, "--second-look", str(most)]
    # Other plugins take longer to load than all else.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in ((code, 1) if code == 2 else (code,)) and says in done.stdout, done.stdout
    assert ("passed alone" in done.stdout) == (code == 0)
