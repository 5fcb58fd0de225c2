"""Hooks of mkdocs: links from docs/ to other files of the repository become their paths, which must exist, and the
list of documents gets all decisions.

The documents are read in the repository too, where such links lead somewhere; on the site nothing is behind them.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)


def without_links_outside(markdown: str, source: pathlib.Path) -> str:
    """`markdown` of document `source`, its links out of docs/ as code; FileNotFoundError if one leads nowhere."""

    def replaced(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = (source.parent / link).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{source.relative_to(ROOT)} links to {link}, which does not exist")
        path = target.relative_to(ROOT).as_posix()
        return f"`{path}`" if text.strip("`").rstrip("/") in (path, target.name) else f"{text} (`{path}`)"

    return "".join(
        part if part.startswith("```") else LINK.sub(replaced, part) for part in FENCE.split(markdown)
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return without_links_outside(markdown, pathlib.Path(page.file.abs_src_path))


def with_decisions(nav: list[Any], docs: pathlib.Path) -> list[Any]:
    """`nav` of mkdocs.yml, in which every document of the folder `decisions` of `docs` is under the word Decisions."""
    decisions = [path.relative_to(docs).as_posix() for path in sorted((docs / "decisions").glob("*.md"))]

    def filled(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {
            title: decisions if title == "Decisions" else [*map(filled, inside)] if isinstance(inside, list) else inside
            for title, inside in entry.items()
        }

    return [*map(filled, nav)]


def on_config(config: Any) -> Any:
    """Called by mkdocs once its settings are read."""
    config["nav"] = with_decisions(config["nav"], pathlib.Path(config["docs_dir"]))
    return config
