"""Recorded results tell nothing of where on a machine they were made."""

from __future__ import annotations

import pathlib
import re

import pytest

RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "results"
FOLDERS = "tmp|var|work|workspace|root|home|mnt|data|opt|srv|scratch|nfs|Users"
PLACE = re.compile(rf"(?<![\w.~-])/(?:{FOLDERS})(?![\w.-])[^\s\"'\\]*")
"""An absolute path; neither part of a relative one nor of an address."""


def test_no_result_names_a_path_of_a_machine() -> None:
    """Whoever repeats the command has another: models and files go by their plain names."""
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 50
    found = [
        f"{path.relative_to(RESULTS).as_posix()}: {place}"
        for path in files
        for place in PLACE.findall(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"command": "quire bench --model /tmp/head"', ["/tmp/head"]),
        (r"{\"model\":\"/root/models/8b\"}", ["/root/models/8b"]),
        ("--out=/home", ["/home"]),
        ("/opt/m /srv/m /scratch/m /nfs/m /mnt/m", ["/opt/m", "/srv/m", "/scratch/m", "/nfs/m", "/mnt/m"]),
        ('"model": "head", "text": "docs/home/tmp/page.md", "at": "http://host/work"', []),
        ('"unit": "tok/s", "a": "/tmpfs"', []),
    ],
)
def test_places_are_recognised(text: str, found: list[str]) -> None:
    assert PLACE.findall(text) == found
