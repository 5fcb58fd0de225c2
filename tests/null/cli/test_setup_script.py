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


def test_a_list_of_packages_is_one_line() -> None:
    found = re.search(r"^briefly\(\) .*?^}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    command = ["bash", "-c", f"{found[0]}\nbriefly"]
    done = subprocess.run(command, input=SAID, capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr == "      installed 2 packages in 3ms\nerror: no such thing\n"
