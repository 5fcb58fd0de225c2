"""docs/mistakes.md has every mistake, and says what Quire says today."""

from __future__ import annotations

import re

import pytest

from benchmarks.mistakes import DOCUMENT, MISTAKES, run

QUICK = (
    "An architecture that Quire has not", "An adapter given as a model", "A folder of GGUF files",
    "Code that comes with a checkpoint",
)  # fmt: skip
"""A few that load nothing and hold no figures of the machine."""


def test_every_mistake_is_on_the_page() -> None:
    titles = re.findall(r"^## \d+\. (.+)$", DOCUMENT.read_text(), re.MULTILINE)
    assert titles == [mistake.title for mistake in MISTAKES] and len(titles) == 20
    assert max(map(len, DOCUMENT.read_text().splitlines())) <= 200


@pytest.mark.parametrize("title", QUICK)
def test_the_page_is_what_a_run_says(title: str) -> None:
    mistake = next(one for one in MISTAKES if one.title == title)
    text, code = run(mistake)
    section = DOCUMENT.read_text().split(f". {title}\n")[1].split("\n## ")[0]
    assert text.startswith("quire: error: ") and f"Exit code {code}." in section
    assert " ".join(text.split()) in " ".join(section.split())
