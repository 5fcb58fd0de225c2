"""How this process starts Python again, for its parts that are processes."""

import os
import sys


def python(*words: str) -> list[str]:
    """A command. Modules are looked for in the current folder only if they are here: `quire` is a script, which does
    not, while `python -m` does, and people have files named queue.py."""
    try:
        folders = {"", os.getcwd()}
    except OSError:  # it is gone
        folders = {""}
    return [sys.executable, *(() if folders.intersection(sys.path) else ("-P",)), *words]
