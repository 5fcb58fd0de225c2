"""The project as the rules see it: files with their syntax trees, what each imports, and which function a line is in.

Modules that are imported by a string count as imported; a public name of `quire` counts as the module that has it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import pathlib
from collections.abc import Iterable, Iterator, Mapping

IMPORTERS = {"import_module", "__import__"}
TEXTS = {".py", ".h", ".cpp", ".cu", ".js", ".css", ".html"}
FOLDERS = ("quire", "csrc", "tests", "benchmarks", "demo", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line that breaks a rule. `scope`: the innermost function or class around it, dotted; "" outside of any."""

    file: str
    line: int
    scope: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.scope}: {self.message}"


class File:
    """One file. `name`: its path from the root of the repository, with slashes. `tree`: empty unless it is Python."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text
        self.is_python = name.endswith(".py")
        self.tree = ast.parse(text if self.is_python else "", name)

    @property
    def package(self) -> str:
        """Folder below quire/, or "" for a file that is in none."""
        parts = self.name.split("/")
        return parts[1] if parts[0] == "quire" and len(parts) > 2 else ""

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @functools.cached_property
    def scopes(self) -> list[tuple[str, ast.AST]]:
        """Functions and classes with dotted names, outer ones first."""
        return list(_scopes(self.tree, ""))

    @functools.cached_property
    def imports(self) -> dict[ast.AST, list[str]]:
        """Node → what it imports, as it is written; of nodes that import something."""
        return {node: names for node in self.nodes if (names := imported(node, self))}

    def scope_of(self, line: int) -> str:
        inside = [name for name, node in self.scopes if node.lineno <= line <= (node.end_lineno or line)]
        return inside[-1] if inside else ""

    def finding(self, node: ast.AST | int, message: str) -> Finding:
        line = node if isinstance(node, int) else node.lineno
        return Finding(self.name, line, self.scope_of(line), message)

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Name in this file → what it stands for: `import torch as t`, `from torch import cuda`."""
        known = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                known |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return known

    def chain(self, node: ast.AST) -> str:
        """`a.b.c` of an expression with aliases resolved, also for `getattr(a.b, "c")`; "" of what is no chain."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.chain(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and self.chain(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            return f"{self.chain(node.args[0])}.{name.value}" if isinstance(name, ast.Constant) else ""
        return ""


@dataclasses.dataclass(frozen=True)
class Project:
    """Files by name, and the operations that the catalogue of kernels and the kernel benchmark know."""

    files: Mapping[str, File]
    catalogue: frozenset[str] = frozenset()
    measured: frozenset[str] = frozenset()
    findings: dict[str, list[Finding]] = dataclasses.field(default_factory=dict)
    """Of the rules that were looked at."""

    @property
    def package(self) -> list[File]:
        """The Python files of quire/."""
        return [file for name, file in self.files.items() if name.startswith("quire/") and file.is_python]

    @functools.cached_property
    def modules(self) -> dict[str, File]:
        return {file.module: file for file in self.package}

    @functools.cached_property
    def public(self) -> dict[str, str]:
        """Public name → the module that has it: `_PLACES` of quire/__init__.py."""
        root = self.files.get("quire/__init__.py")
        for node in root.tree.body if root else ():
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_PLACES":
                return dict(ast.literal_eval(node.value))
        return {}

    def imports(self, file: File, within: Iterable[ast.AST] | None = None) -> Iterator[tuple[str, ast.AST]]:
        """(module, statement or call) of all that is imported, by a statement or a string, in the nodes `within`."""
        for node in file.imports if within is None else within:
            for name in file.imports.get(node, ()):
                place = self.public.get(name.removeprefix("quire.")) if name.startswith("quire.") else None
                yield place or name, node


def imported(node: ast.AST, file: File) -> list[str]:
    """What one node imports, as it is written. `from a import b` is both a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name] if (name := import_string(node, file)) else []


def import_string(node: ast.AST, file: File) -> str | None:
    """The module that a call of import_module or __import__ names by a constant, "" for another argument."""
    if not isinstance(node, ast.Call) or file.chain(node.func).split(".")[-1] not in IMPORTERS:
        return None
    first = next(iter([*node.args, *(word.value for word in node.keywords if word.arg == "name")]), None)
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not those of functions, nor under `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _scopes(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{outer}.{child.name}" if outer else child.name
            yield name, child
            yield from _scopes(child, name)
        else:
            yield from _scopes(child, outer)


def of_texts(texts: Mapping[str, str], **known: frozenset[str]) -> Project:
    was_enabled = gc.isenabled()
    gc.disable()  # trees are millions of objects and no garbage: looking for it takes four fifths of the time
    try:
        return Project({name: File(name, text) for name, text in texts.items()}, **known)
    finally:
        if was_enabled:
            gc.enable()


def of_folder(root: pathlib.Path, **known: frozenset[str]) -> Project:
    """What the repository holds; not what was built in it or comes from elsewhere (vendor, node_modules)."""
    texts = {
        name: path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in TEXTS
        and not {"vendor", "node_modules", "__pycache__"} & set(path.parts)
        and not (name := path.relative_to(root).as_posix()).startswith("quire/_csrc/")
    }
    return of_texts(texts, **known)
