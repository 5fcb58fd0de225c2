"""Runs pages of docs: their Python and their commands, and compares or writes anew what stands behind them.

A page is run block by block in one namespace. Behind ```python or ```console stands ```text, what it prints; in that of
a command a line `...` stands for any lines. `python -m course_pages` writes the outputs of whole blocks anew.
A simulation that takes long is not run: its --output-json is on record, and its table is made of that.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import tempfile
from typing import NamedTuple

from quire.bench.simulate import tables
from quire.bench.simulate.record import Run
from quire.bench.simulate.session import Point
from quire.cli.command import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
COURSE = sorted((ROOT / "docs" / "course").glob("[0-9]-*.md"))
PAGES = [*COURSE, *(ROOT / "docs" / name for name in ("plan-train.md", "plan.md", "simulate.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)
ELISION = "..."
WRITES = ("--output-json", "--output", "--plot")
"""Flags that name a file, or a folder, to be written."""


class Block(NamedTuple):
    """A block that was run."""

    code: str
    shown: str | None
    """What the page says it prints; None: nothing."""
    printed: str
    place: tuple[int, int]
    """Of what is shown, in the text of the page."""

    @property
    def agrees(self) -> bool:
        """Whether the page tells the truth."""
        shown, printed = (self.shown or "").splitlines(), self.printed.splitlines()
        if ELISION not in shown:
            return shown == printed
        at = 0
        for number, line in enumerate(shown):
            if line == ELISION:
                continue
            is_next = number == 0 or shown[number - 1] != ELISION
            where = [i for i in range(at, len(printed)) if printed[i] == line]
            if not where or (is_next and where[0] != at):
                return False
            at = where[0] + 1
        return shown[-1] == ELISION or at == len(printed)


def asked(words: list[str]) -> list[str]:
    """A command without where it writes, which is a tracked file only for who makes the record anew."""
    places = {i + 1 for i, word in enumerate(words) if word in WRITES}
    return [word for i, word in enumerate(words) if i not in places]


def written() -> list[str]:
    """What commands of these pages write."""
    found = []
    for match in (one for page in PAGES for one in BLOCK.finditer(page.read_text(encoding="utf-8"))):
        words = shlex.split(match[2].replace("\\\n", " ")) if match[1] == "console" else []
        found += [words[i + 1] for i, word in enumerate(words) if word in WRITES]
    return found


def of_record(words: list[str]) -> str | None:
    """The table of a simulation whose report is on record; None: there is none."""
    name = words[words.index("--output-json") + 1] if "--output-json" in words else ""
    path = ROOT / "benchmarks" / "results" / name
    if not name or not path.exists():
        return None
    report = json.loads(path.read_text())
    assert asked(shlex.split(report["command"])) == asked(["quire", *words]), f"{name} is of another command"
    results = report["results"]
    rows = results.get("baselines") or results["runs"]
    if "baselines" in results:
        lines = tables.curve([Point(row["variant"], row["rate"], Run([], []), row) for row in rows])
    else:
        own = {"variant", "rate", "cpu_s", "refusals"}
        lines = tables.side_by_side({row["variant"]: {k: row[k] for k in row if k not in own} for row in rows})
    return "\n".join(lines) + "\n"


def run_page(page: pathlib.Path) -> list[Block]:
    """Each block of a page, run in the current folder."""
    text, found, names = page.read_text(encoding="utf-8"), [], {"__name__": "page"}
    if not pathlib.Path("benchmarks").exists():  # recorded results, as in a checkout
        pathlib.Path("benchmarks").symlink_to(ROOT / "benchmarks")
    for match in BLOCK.finditer(text):
        kind, code, shown = match.groups()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if kind == "python":
                exec(compile(code, str(page), "exec"), names)
            else:
                command, word, *words = shlex.split(code.replace("\\\n", " "))
                known = of_record(words)
                print(known or "", end="")
                wanted = int(any(text in (shown or "") for text in ("it does not fit:", "does NOT fit:")))
                assert (command, word) == ("$", "quire") and (known or run(words) == wanted), code
        found.append(Block(code, shown, out.getvalue(), match.span(3)))
    return found


def rewritten(page: pathlib.Path, blocks: list[Block]) -> str:
    """The page with what its blocks printed, those with lines left out as they are."""
    text = page.read_text(encoding="utf-8")
    for block in reversed(blocks):
        if block.shown is not None and ELISION not in block.shown.splitlines():
            text = text[: block.place[0]] + block.printed + text[block.place[1] :]
    return text


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for page in PAGES:
            blocks = run_page(page)
            page.write_text(rewritten(page, blocks), encoding="utf-8")
            print(page.name, *(f"DIFFERS: {one.code}" for one in blocks if one.shown and not one.agrees))


if __name__ == "__main__":
    main()
