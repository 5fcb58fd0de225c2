"""What ranks of a running engine say to one another is what the planner says: as many calls, and as many bytes."""

from __future__ import annotations

import sys

import pytest

from benchmarks.rank_traffic import CASES, case_rows


@pytest.mark.parametrize("case", ["tensor parallel", "data parallel, experts apart"])
def test_calls_and_bytes_are_the_formula(case: str) -> None:
    model, given = CASES[case]
    rows = case_rows(case, model, given, 2, "cpu", 64)
    assert {row["step"] for row in rows} == {"prompt", "decode"} and len(rows) == 6
    for row in rows:
        assert (row["calls"], row["bytes"]) == (row["formula_calls"], row["formula_bytes"]), row
    whole = [row for row in rows if row["what"] == "all"]
    if sys.platform == "linux":
        assert all(row["bytes"] < row["wire_bytes"] < row["bytes"] + 8000 for row in whole), "as its sockets have sent"
