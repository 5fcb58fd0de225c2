"""Owns the text corpus: the Python standard library's source, and the documentation that is installed with it.

A document is one source file, one help topic, or the docstrings of one file set out as a manual page. The side
of the split is decided by the file's path (or the topic's name), so no part of a held-out file is trained on.
"""

from __future__ import annotations

import ast
import inspect
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .holdout import is_held_out

MAX_FILE_BYTES = 300_000
SKIPPED = (
    "site-packages/",
    "dist-packages/",
    "__pycache__/",
    "lib2to3/tests/data/",
    "test/cjkencodings/",
    "test/bad",
    "pydoc_data/topics.py",
    "test/encoded_modules/",
)
BUILTIN_TYPES = (
    str,
    bytes,
    list,
    dict,
    set,
    tuple,
    int,
    float,
    frozenset,
    bytearray,
    complex,
    object,
    type,
    range,
    slice,
    memoryview,
)


@dataclass(frozen=True)
class Document:
    """A text with its kind ("code", "tests" or "docs"), its name and its side of the split."""

    kind: str
    name: str
    text: str
    held_out: bool


def _is_table(text: str) -> bool:
    """True for files that are mostly character or number tables."""
    letters = sum(c.isalpha() and c.isascii() for c in text[:20_000])
    return (
        letters < 0.4 * min(len(text), 20_000)
        or text.count("\\u") + text.count("0x") + text.count("\\x") > len(text) / 60
    )


def _manual(name: str, tree: ast.Module) -> str:
    """The docstrings of a module as a manual page: signature, then text."""
    pages: list[str] = []

    def walk(node: ast.AST, path: str) -> None:
        for child in getattr(node, "body", []):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                text = ast.get_docstring(child)
                full = f"{path}.{child.name}"
                if text and len(text) > 30:
                    shown = f"class {full}" if isinstance(child, ast.ClassDef) else f"{full}({ast.unparse(child.args)})"
                    pages.append(shown + "\n" + "\n".join("    " + line if line else "" for line in text.splitlines()))
                if isinstance(child, ast.ClassDef):
                    walk(child, full)

    about = ast.get_docstring(tree)
    if about:
        pages.append(f"Module {name}\n\n{about}")
    walk(tree, name)
    return "\n\n".join(pages)


def _source_documents(root: Path, path: Path) -> list[Document]:
    name = path.relative_to(root).as_posix()
    if path.stat().st_size > MAX_FILE_BYTES or any(part in name for part in SKIPPED):
        return []
    try:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return []
    if len(text) < 100 or _is_table(text):
        return []
    tests = name.startswith("test/") or "/test" in name
    held_out = is_held_out("file", name)
    documents = [Document("tests" if tests else "code", name, text, held_out)]
    manual = "" if tests else _manual(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."), tree)
    if len(manual) > 200:
        documents.append(Document("docs", name, manual, held_out))
    return documents


def _topics(root: Path) -> list[Document]:
    """The language reference as `help()` shows it."""
    tree = ast.parse((root / "pydoc_data" / "topics.py").read_text("utf-8"))
    assigned = next(node for node in tree.body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assigned.value)
    return [Document("docs", f"topic {name}", text, is_held_out("topic", name)) for name, text in topics.items()]


def _builtin_pages() -> list[Document]:
    """The documentation of the built-in types, from the running interpreter (training only)."""
    documents = []
    for kind in BUILTIN_TYPES:
        members = [
            f"{kind.__name__}.{n}\n    {inspect.getdoc(m)}"
            for n, m in vars(kind).items()
            if n[0] != "_" and inspect.getdoc(m)
        ]
        documents.append(
            Document(
                "docs",
                f"builtin {kind.__name__}",
                f"class {kind.__name__}\n{kind.__doc__}\n\n" + "\n\n".join(members),
                False,
            )
        )
    return documents


def load(root: Path | None = None) -> list[Document]:
    """All documents of the standard library at `root` (default: the running Python's), in a fixed shuffled order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = _topics(root) + _builtin_pages()
    for path in sorted(root.rglob("*.py")):
        documents += _source_documents(root, path)
    random.Random(0).shuffle(documents)
    return documents


def main() -> None:
    """Print how much there is of each kind."""
    documents = load()
    for kind in ("code", "tests", "docs"):
        for held_out in (False, True):
            chosen = [d for d in documents if d.kind == kind and d.held_out == held_out]
            size = sum(len(d.text.encode()) for d in chosen)
            print(f"{kind:6} {'held out' if held_out else 'training':9} {len(chosen):5} documents {size:>10} bytes")


if __name__ == "__main__":
    main()
