"""The chart of `quire bench speculate` from its report.

python -m benchmarks.draft_plot benchmarks/results/h200/speculate_head_8b.json docs/speculation-h200.png "One H200"
"""

from __future__ import annotations

import json
import pathlib
import sys

import msgspec

from quire.bench.draft_chart import panels, write_draft_chart
from quire.planner.drafts import DraftCosts


def main() -> None:
    """Arguments: the report, the picture and its title."""
    report, picture, title = sys.argv[1:]
    results = json.loads(pathlib.Path(report).read_text())["results"]
    write_draft_chart(picture, panels(results["cases"], msgspec.convert(results["costs"], DraftCosts)), title)


if __name__ == "__main__":
    main()
