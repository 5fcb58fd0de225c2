"""Documents can be read in a plain editor (no line is longer than 200 characters), their links lead to files, and the
site lists all of docs/."""

from __future__ import annotations

import pathlib
import re
import runpy
from collections.abc import Iterator
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_LINE = 200
MAX_README_LINES, MAX_README_TABLES = 60, 1
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)
FOLDERS = (".github", "benchmarks", "csrc", "demo", "docker", "docs", "examples", "packaging", "quire", "tests")


def documents(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Every Markdown file that belongs to the project: of the root, and of the folders that hold its files."""
    yield from sorted(root.glob("*.md"))
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.md"))


def long_lines(root: pathlib.Path) -> list[str]:
    """`file:line` and the length of each line that is too long, in characters."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}: {len(line)} characters, limit {MAX_LINE}: shorten or break it"
        for path in documents(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_LINE
    ]


def lost_links(root: pathlib.Path) -> list[str]:
    """`file: target` of each relative link to a file that does not exist. Code is not looked at."""
    found = []
    for path in documents(root):
        text = CODE.sub("", path.read_text(encoding="utf-8"))
        targets = [target for target in LINK.findall(text) if not re.match(r"[a-z]+:|#", target)]
        name = path.relative_to(root).as_posix()
        found += [f"{name}: {target}" for target in targets if not (path.parent / target.split("#")[0]).exists()]
    return found


def test_no_line_of_a_document_is_too_long() -> None:
    found = long_lines(ROOT)
    assert not found, "\n".join(found)


def unlisted_scripts(root: pathlib.Path) -> list[str]:
    """Names of those of benchmarks/ that can be run, and that no page says anything of."""
    pages = "".join((root / page).read_text(encoding="utf-8") for page in ("docs/bench.md", "benchmarks/README.md"))
    named = set(re.findall(r"\w+", pages))
    scripts = (path for path in sorted((root / "benchmarks").glob("*.py")) if "__main__" in path.read_text("utf-8"))
    return [path.name for path in scripts if path.stem not in named]


def test_scripts_that_measure_are_listed(tmp_path: pathlib.Path) -> None:
    assert not unlisted_scripts(ROOT)
    for page in ("docs/bench.md", "benchmarks/README.md"):
        (tmp_path / page).parent.mkdir()
        (tmp_path / page).write_text("`python -m benchmarks.known`")
    for name, text in (("known", '"__main__"'), ("new", '"__main__"'), ("part", "")):
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    assert unlisted_scripts(tmp_path) == ["new.py"]


def test_the_readme_takes_a_minute() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_README_LINES
    assert sum(re.fullmatch(r"\|[-:|]+\|", line) is not None for line in lines) == MAX_README_TABLES


def test_the_documents_are_found() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in documents(ROOT)}
    assert {"README.md", "docs/options.md", "docs/decisions/0001-dependencies.md"} <= found


def test_the_rule_catches_a_long_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    (tmp_path / "README.md").write_text("é" * MAX_LINE + "\n")
    assert long_lines(tmp_path) == []
    (tmp_path / "docs" / "decisions" / "0099-why.md").write_text("short\n" + "| cell " * 29 + "\n")
    assert long_lines(tmp_path) == ["docs/decisions/0099-why.md:2: 203 characters, limit 200: shorten or break it"]


def test_links_lead_to_files() -> None:
    found = lost_links(ROOT)
    assert not found, "\n".join(found)


def test_the_rule_catches_a_lost_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "here.md").touch()
    (tmp_path / "README.md").write_text("[a](docs/here.md#part) [b](https://example.org) [c](#part) `[d](none.md)`\n")
    assert lost_links(tmp_path) == []
    (tmp_path / "docs" / "there.md").write_text("[a](here.md) [b](../docs/gone.md)\n")
    assert lost_links(tmp_path) == ["docs/there.md: ../docs/gone.md"]


def test_the_site_lists_every_document() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inside in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(inside)

    hooks = runpy.run_path(str(ROOT / "packaging" / "docs_links.py"))
    nav = hooks["with_decisions"](yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"], ROOT / "docs")
    documents = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(pages(nav)) == documents, "mkdocs.yml has to list what is in docs/, except the decisions"
