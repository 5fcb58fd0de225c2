"""The planner and the simulator are held to their word on whole-model runs on record; docs/plan.md shows it."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import recorded_runs
from benchmarks.plan_against_measured import BEYOND, Line, bars_table, lines, records, rewritten, table
from benchmarks.plan_fit import FILE
from benchmarks.recorded_runs import BEFORE, REPORTS, RESULTS, TOLD, figures
from quire.planner.calibration import load_calibration
from quire.planner.error_bar import farthest

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found() -> list[Line]:
    return lines()


def test_every_line_is_within_its_limit_but_those_that_the_page_names(found: list[Line]) -> None:
    wrong = {(one.shape, one.what) for one in found if not one.holds}
    assert wrong == BEYOND, "\n".join(one.text() for one in found if (one.shape, one.what) in wrong ^ BEYOND)


def test_error_bars_are_those_of_the_table(found: list[Line]) -> None:
    known = load_calibration(FILE)
    assert known.records == records(found), "python -m benchmarks.plan_against_measured --write"
    for one in found:
        bar = farthest(one.kinds, known)[1]
        for expected in (one.planned, one.simulated):
            assert expected is None or all(1 / (1 + bar) <= each / expected <= 1 + bar for each in one.measured)


def test_every_line_names_the_files_that_it_is_from(found: list[Line]) -> None:
    for one in found:
        assert one.files and all((RESULTS / f"{name}.json").is_file() for name in one.files)
        assert one.text().endswith(", ".join(one.files))
    named = {name for one in found for name in one.files}
    assert named >= {*REPORTS, *TOLD, "whole_models_turns", "experts_models", "kv_groups", "lab_notes", "deterministic"}


def test_runs_that_are_left_out_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason to leave runs out leaves some out: one that does not is of a file that is no more."""
    n_runs = sum(map(len, figures().values()))
    for reason in BEFORE:
        monkeypatch.setattr(recorded_runs, "BEFORE", BEFORE - {reason})
        assert sum(map(len, figures().values())) > n_runs, reason


def test_the_page_has_the_error_bars(found: list[Line]) -> None:
    assert "\n".join(bars_table(found)) + "\n\n" in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8"), (
        "python -m benchmarks.plan_against_measured --write"
    )


def test_all_kinds_of_runs_are_there(found: list[Line]) -> None:
    shapes = {one.shape for one in found}
    assert len(found) == len(figures()) and {
        "qwen3-0.6b", "llama-3.1-8b", "llama-3.1-8b tp 2", "llama-3.1-8b fp8", "llama-3.1-8b kv fp8", "qwen3-30b-a3b",
        "deepseek-v2-lite", "gpt-oss-20b", "llama-3.1-8b tp 4", "llama-3.1-70b tp 4", "llama-3.1-8b dp 4",
        "llama-3.1-8b pcp 4", "llama-3.1-8b pcp 2", "llama-3.1-8b pcp 2 ring", "llama-3.1-8b pp 2",
        "llama-3.1-70b fp8", "llama-3.1-8b int4-g128",
        "llama-3.1-70b int4-g128", "gemma-3-1b", "qwen3-30b-a3b even", "deepseek-v2-lite even",
        "gpt-oss-20b mxfp4",
    } == shapes  # fmt: skip
    assert sum(one.simulated is not None for one in found) > 60 and {one.limit for one in found} == {
        0.05,
        0.1,
        0.12,
        0.15,
    }


def test_the_page_has_the_table(found: list[Line]) -> None:
    text = "\n".join(table(found))
    assert text in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8"), (
        f"python -m {lines.__module__} prints\n{text}"
    )


def test_a_command_puts_the_table_into_the_page(found: list[Line]) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    first = found[0].text()
    bar = list(bars_table(found))[-1]
    assert first in page and bar in page
    assert rewritten(page.replace(first, "of another day").replace(bar, "| and of another kind |"), found) == page


def test_the_run_that_is_farthest_away_counts() -> None:
    line = Line("a", "b", (90.0, 100.0, 104.0), 0.10, planned=100.0, simulated=95.0)
    assert line.error(100.0) == pytest.approx(1 / 9) and not line.holds
    assert Line("a", "b", (95.0, 104.0), 0.10, planned=100.0).holds
