"""The pages of docs/course, and those of planning and simulating, run, and print what they say they print."""

from __future__ import annotations

import fnmatch
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from course_pages import COURSE, PAGES, ROOT, Block, rewritten, run_page, written

from quire.cli.command import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the pages run; page 1 writes there what the others read."""
    place = tmp_path_factory.mktemp("course")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run_page(PAGES[0])
    return place


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, page: pathlib.Path) -> None:
    monkeypatch.chdir(folder)
    blocks = run_page(page)
    assert len(blocks) >= 5
    unseen = re.findall(r"^quire (?:plan|simulate) .*", page.read_text(encoding="utf-8"), re.M)
    assert not unseen, "a command without `$` in a block of a console is not run"
    for block in blocks:
        assert block.agrees, f"{block.code}\nprints\n{block.printed}\nand the page shows\n{block.shown}"
    assert rewritten(page, blocks) == page.read_text(encoding="utf-8")


def test_commands_of_pages_leave_a_checkout_as_it_was() -> None:
    """What they write in the folder in which they run is ignored by git."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    for name in [*written(), "llama-2-7b", "runs.csv"]:
        assert any(fnmatch.fnmatchcase(name, one) for one in ignored), f"{name}: add it to .gitignore"
    assert {"simulate_replicas.json", "baselines_simulated.json", "baselines_simulated"} <= set(written())


def test_what_is_on_record_is_of_todays_cost_model(tmp_path: pathlib.Path) -> None:
    """Pages show tables of simulations that would take too long here: one run of them again, to the last digit."""
    record = json.loads((ROOT / "benchmarks" / "results" / "baselines_simulated.json").read_text())
    known = next(row for row in record["results"]["baselines"] if row["variant"] == "chunked and tree")
    words, report = shlex.split(record["command"])[1:], tmp_path / "again.json"
    words = [*words[: words.index("--baselines")], "--request-rate", str(known["rate"]), "--output-json", str(report)]
    assert run(words) == 0
    (again,) = json.loads(report.read_text())["results"]["runs"]
    same = set(known) - {"variant", "cpu_s"}
    assert {name: again[name] for name in same} == {name: known[name] for name in same}, (
        "simulate_replicas.json and baselines_simulated.json are of another cost model: their commands are in them"
    )


def test_there_are_five_pages_without_torch() -> None:
    """The last page is of `quire simulate`, of which another test knows."""
    assert [page.name[0] for page in COURSE] == ["1", "2", "3", "4", "5"]
    code = "import os, sys, tempfile, course_pages as c; os.chdir(tempfile.mkdtemp())\n"
    code += "for page in c.PAGES[:-1]: c.run_page(page)\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.stdout == "False\n"


@pytest.mark.parametrize(("shown", "printed", "agrees"), [
    ("a\nb\n", "a\nb\n", True), ("a\n", "a\nb\n", False), (None, "", True), (None, "a\n", False),
    ("...\nb\n...\n", "a\nb\nc\n", True), ("...\nd\n...\n", "a\nb\nc\n", False), ("a\n...\n", "a\nb\n", True),
    ("b\n...\n", "a\nb\n", False), ("...\na\nc\n...\n", "a\nb\nc\n", False), ("...\nb\n", "a\nb\nc\n", False),
    ("...\nb\n...\na\n...\n", "a\nb\nc\n", False),
])  # fmt: skip
def test_what_counts_as_shown(shown: str | None, printed: str, agrees: bool) -> None:
    assert Block("", shown, printed, (0, 0)).agrees is agrees
