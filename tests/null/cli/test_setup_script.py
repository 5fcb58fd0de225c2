"""packaging/setup: what is left of what uv says."""

from __future__ import annotations

import pathlib
import re
import subprocess

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "packaging" / "setup"
SAID = """Using Python 3.11.2 environment at: .venv
Resolved 60 packages in 1ms
Downloading torch (190MiB)
 Downloaded torch
Prepared 3 packages in 2 s
Uninstalled 1 package in 1ms
Installed 2 packages in 3ms
 - a==0
 + a==1
 ~ b==2
error: no such thing
"""


def function(name: str) -> str:
    """A function of the script, as text."""
    found = re.search(rf"^{name}\(\) .*?^}}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def test_compilers_are_told_of_before_they_have_done_a_file() -> None:
    """Ten seconds are one here: what is waited for is stood in for."""
    stand_ins = 'say() { printf "%s\\n" "$*" >&2; }\nsleep() { command sleep 0.1; }\n'
    stand_ins += 'install() { command sleep 1.5; touch "$TMPDIR/a.o" "$TMPDIR/b.o"; command sleep 1; return "$1"; }\n'
    script = f"{stand_ins}{function('install_watched')}\nstage_began=$SECONDS\ninstall_watched 3"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    found = [line.strip().partition(" after ")[0] for line in done.stderr.splitlines()]
    assert done.returncode == 3 and found[0] == "0 files of kernels are compiled"
    assert found[-1] == "2 files of kernels are compiled", "and how far they are later"


def test_a_list_of_packages_is_one_line() -> None:
    command = ["bash", "-c", f"{function('briefly')}\nbriefly"]
    done = subprocess.run(command, input=SAID, capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr == "      installed 2 packages in 3ms\nerror: no such thing\n"
