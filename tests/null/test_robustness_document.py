"""docs/robustness.md names each case once, and tests that exist; so do the limits in docs/operating.md."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUPS = {"H": 34, "J": 13, "S": 17, "P": 14, "G": 13, "T": 11, "D": 13, "O": 11, "M": 15, "C": 22, "K": 9, "F": 29}
GROUPS |= {"W": 4, "I": 12, "X": 10}
GROUPS |= {"B": 19, "U": 8}
REASON = re.compile(r"n/a|no test|partly|benchmarks/|warning|left to")


def rows() -> list[list[str]]:
    """Case, what it is, tests, result."""
    text = (ROOT / "docs" / "robustness.md").read_text()
    return joined(re.findall(r"^\| (?:[A-Z]\d\d |\|).*", text, re.M))


def joined(lines: list[str]) -> list[list[str]]:
    """Cells of the rows of a table; a row whose first cell is empty goes on with the row above it."""
    found: list[list[str]] = []
    for line in lines:
        cells = [cell.strip() for cell in line[1:].rstrip("|").split("|")]
        if cells[0]:
            found.append(cells)
        else:
            found[-1] = [f"{above} {more}".strip() for above, more in zip(found[-1], cells, strict=True)]
    return found


def known_tests() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        names = re.findall(r"^(?:async )?def test_(\w+)\(", path.read_text(), re.M)
        found.setdefault(path.stem.removeprefix("test_"), set()).update(names)
    return found


def test_every_case_stands_there_once() -> None:
    names = [row[0] for row in rows()]
    assert len(set(names)) == len(names)
    n_rows = {group: sum(name[0] == group for name in names) for group in GROUPS}
    assert all(n_rows[group] >= least for group, least in GROUPS.items()), "a case is gone"
    assert sum(n_rows.values()) == len(names), "a case of no group"
    assert all(len(row) == 4 and row[3] for row in rows()), "a case without a result"


def test_the_tests_exist() -> None:
    known = known_tests()
    for case, _, tests, result in rows():
        assert tests or REASON.search(result), f"{case} has neither a test nor a reason"
        for test in tests.split():
            file, _, name = test.partition("::")
            assert name in known.get(file, set()), f"{case}: there is no {test}"


def test_each_limit_of_a_request_is_tried() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    section = text.split("## What one request may cost\n")[1].split("\n## ")[0]
    limits = joined(re.findall(r"^\|.*", section, re.M))[2:]
    assert len(limits) >= 20, "a limit is gone"
    known = known_tests()
    for limit in limits:
        assert len(limit) == 4 and all(limit), f"{limit[0]}: a limit needs a value, an option or constant, and a test"
        for test in limit[3].split():
            file, _, name = test.partition("::")
            assert name in known.get(file, set()), f"{limit[0]}: there is no {test}"
