"""The rules of the design, each a function from the project to the lines that break it.

`RULES` lists them; test_rules.py holds the repository to them, and test_mutants.py shows what each catches.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from project import IMPORTERS, File, Finding, Function, Project, import_string, run_at_import

MAX_FUNCTION_LINES, MAX_CLASS_LINES, MAX_DOCSTRING_LINES = 80, 300, 10
MAX_FILE_LINES = {"quire": 400, "csrc": 500, "tests": 600, "benchmarks": 400, "demo": 400, "examples": 400}
TORCH_FREE = ("core", "config", "planner", "control", "text")
FORBIDDEN_NAMES = {"utils.py", "common.py", "helpers.py", "misc.py"}
PICKLES = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
ANYTHING = {"Exception", "BaseException"}

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "config": {"core"},
    "planner": {"config", "core"},
    "text": {"planner", "config", "core"},
    "control": {"planner", "config", "core"},
    "kernels": {"planner", "config", "core"},
    "compute": {"kernels", "planner", "config", "core"},
    "engine": {"control", "text", "compute", "kernels", "planner", "config", "core"},
    "serve": {"engine", "text", "config", "core"},
    "bench": {"engine", "kernels", "planner", "config", "core"},
    "cli": {"serve", "bench", "engine", "control", "text", "compute", "kernels", "planner", "config", "core"},
}


ENGINE_INTERFACE = {"async_llm": "the engine", "stream": "what AsyncLLM.submit hands out"}
"""Modules of the engine that every module of the server may import. Values stand in core."""
PROCESS_IMPORTS = {
    "quire/serve/replicas.py": {"replicas": "the engines that it serves"},
    "quire/serve/batch/spread.py": {"replicas": "the engines that answer"},
    "quire/serve/server.py": {
        "supervisor": "names the command of the engine process to those that start it",
        "logs": "the log of a server's processes is set up alike",
        "garbage": "the collector of a server's processes is set up alike",
    },
    "quire/serve/api_processes.py": {
        "supervisor": "starts the engine process for several API processes",
        "child": "starts the API processes as the engine is started",
    },
    "quire/serve/api_process.py": {"child": "reads the first line that its parent process wrote"},
}
"""Modules of processes and what more of the engine they import, with the reason."""


def relative_import(project: Project) -> Iterator[Finding]:
    for file in project.package:
        for node in file.nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                yield file.finding(node, "write the whole name of the module")


def import_direction(project: Project) -> Iterator[Finding]:
    """Packages below only. The package itself is no way around: its public names count as where they are."""
    for file in project.package:
        allowed = MAY_IMPORT.get(file.package)
        for name, node in project.imports(file):
            other = name.split(".")[1] if name.startswith("quire.") else ""
            if isinstance(node, ast.Import) and name == "quire":
                yield file.finding(node, "`import quire` hides what is used: name the module")
            elif isinstance(node, ast.ImportFrom) and name == "quire.*":
                yield file.finding(node, "`from quire import *` hides what is used: name the module")
            elif allowed is not None and other in MAY_IMPORT and other != file.package and other not in allowed:
                yield file.finding(node, f"{file.package} imports {name}")


def engine_interface(project: Project) -> Iterator[Finding]:
    """The server knows the engine through a short list of modules; a line of the list that is not needed is a fault."""
    for file in project.package:
        if file.package != "serve":
            continue
        more = PROCESS_IMPORTS.get(file.name, {})
        used = set()
        for name, node in project.imports(file):
            parts = name.split(".")
            if parts[:2] != ["quire", "engine"] or (len(parts) == 2 and isinstance(node, ast.ImportFrom)):
                continue
            module = parts[2] if len(parts) > 2 else ""
            used.add(module)
            if module not in ENGINE_INTERFACE and module not in more:
                yield file.finding(node, f"{name} is not on the list of what the server knows of the engine")
        for module in more.keys() - used:
            yield file.finding(file.tree, f"PROCESS_IMPORTS lists {module}, which is not imported")


ATTENTION_PARTS: dict[str, set[str]] = {
    "variant": set(),
    "schedule": set(),
    "cpu": {"variant", "schedule"},
    "hopper": {"variant", "schedule"},
    "triton": {"variant", "schedule"},
}
"""Folders of quire/kernels/attention, and which others each may know; what stands beside them may know all."""


def attention_parts(project: Project) -> Iterator[Finding]:
    """What is computed and who computes it do not know each other, nor back ends each other, nor any part the entry."""
    for file in project.package:
        part = file.name.removeprefix("quire/kernels/attention/").split("/")[0]
        if not file.name.startswith(f"quire/kernels/attention/{part}/"):
            continue
        for name, node in project.imports(file):
            other = name.removeprefix("quire.kernels.attention.").split(".")[0]
            inside = name.startswith("quire.kernels.attention.")
            if inside and other not in ATTENTION_PARTS.get(part, set()) | {part}:
                yield file.finding(node, f"attention/{part} imports {name}")


def import_cycle(project: Project) -> Iterator[Finding]:
    """Of what runs when modules are imported, also inside `try` and `if`."""
    modules = project.modules
    edges: dict[str, list[tuple[str, ast.AST]]] = {}
    for module, file in modules.items():
        found = list(project.imports(file, run_at_import(file.tree)))
        names = {name for name, _ in found}
        # `from package import module` needs the module; the package itself is being imported already.
        outer = {name.rpartition(".")[0] for name in names if name in modules}
        edges[module] = [
            (name, node) for name, node in found if name in modules and name != module and name not in outer
        ]
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> Iterator[Finding]:
        done.add(module)
        for target, node in edges[module]:
            if target in (*path, module):
                cycle = (*path, module)[(*path, module).index(target) :]
                yield modules[module].finding(node, "import cycle: " + " > ".join((*cycle, target)))
            elif target not in done:
                yield from visit(target, (*path, module))

    for module in modules:
        if module not in done:
            yield from visit(module, ())


def import_in_function(project: Project) -> Iterator[Finding]:
    """Of our own modules, outside the command line."""
    for file in project.package:
        if file.package != "cli":
            functions = [node for _, node in file.scopes if isinstance(node, Function)]
            for name, node in project.imports(file):
                inside = any(one.lineno <= node.lineno <= (one.end_lineno or one.lineno) for one in functions)
                if inside and name.split(".")[0] == "quire":
                    yield file.finding(node, f"imports {name} inside a function")


def import_string_constant(project: Project) -> Iterator[Finding]:
    """A module that is imported by a string must be a constant of the call, so that the other rules can see it."""
    for file in project.package:
        calls = {id(node.func): node for node in file.nodes if isinstance(node, ast.Call)}
        for node in file.nodes:
            if file.chain(node).split(".")[-1] not in IMPORTERS:
                continue
            call = calls.get(id(node))
            if call is None:
                yield file.finding(node, "an importer is passed on: call it with the name of the module")
            elif not import_string(call, file):
                yield file.finding(node, "imports a module whose name is computed")


def torch_free(project: Project) -> Iterator[Finding]:
    for file in project.package:
        for name, node in project.imports(file):
            if file.package in TORCH_FREE and name.split(".")[0] == "torch":
                yield file.finding(node, f"{file.package} imports {name}")


def no_transformers(project: Project) -> Iterator[Finding]:
    """A dependency of tests only."""
    for file in project.package:
        for name, node in project.imports(file):
            if name.split(".")[0] == "transformers":
                yield file.finding(node, f"imports {name}")


def size(project: Project) -> Iterator[Finding]:
    for name, file in project.files.items():
        limit = MAX_FILE_LINES[name.split("/")[0]]
        n_lines = len(file.text.splitlines())
        if n_lines > limit:
            yield Finding(name, 1, "", f"{n_lines} lines, limit {limit}")
        for scope, node in file.scopes:
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
            if n_lines > limit:
                yield Finding(name, node.lineno, scope, f"{n_lines} lines, limit {limit}")


def names_and_docstrings(project: Project) -> Iterator[Finding]:
    for file in project.package:
        last = file.name.split("/")[-1]
        if last in FORBIDDEN_NAMES or last.removesuffix(".py").endswith("_v2"):
            yield file.finding(1, "name the file after what it holds")
        doc = ast.get_docstring(file.tree)
        if last != "__init__.py" and doc is None:
            yield file.finding(1, "no module docstring")
        n_lines = len([line for line in (doc or "").splitlines() if line.strip()])
        if n_lines > MAX_DOCSTRING_LINES:
            yield file.finding(1, f"module docstring of {n_lines} lines, limit {MAX_DOCSTRING_LINES}")


def forbidden_statement(project: Project) -> Iterator[Finding]:
    for file in project.package:
        for node in file.nodes:
            if isinstance(node, ast.Global):
                yield file.finding(node, "global statement")
            if isinstance(node, ast.Call) and file.chain(node.func).removeprefix("builtins.") in {"eval", "exec"}:
                yield file.finding(node, "eval or exec")
        for name, node in project.imports(file):
            if name.split(".")[0] in PICKLES:
                yield file.finding(node, f"imports {name}")


def _may_use_cuda(name: str) -> bool:
    launchers = ("triton", "hopper", "attention/schedule/work.py")
    in_launcher = name.startswith("quire/kernels/") and any(part in name for part in launchers)
    return name == "quire/compute/device/cuda.py" or in_launcher


PLACES: dict[str, Callable[[str], bool]] = {
    "torch.cuda": _may_use_cuda,
    "torch.distributed": lambda name: name.startswith("quire/compute/dist/"),
    "ray": lambda name: name == "quire/engine/replicas/ray.py",
    "os.environ": lambda name: name == "quire/core/env.py",
    "os.getenv": lambda name: name == "quire/core/env.py",
}


def place(project: Project) -> Iterator[Finding]:
    """torch.cuda, torch.distributed, ray and os.environ each have their own place."""
    for file in project.package:
        used = [(file.chain(node), node) for node in file.nodes if not isinstance(node, ast.Name)]
        for name, node in [*used, *project.imports(file)]:
            for power, allowed in PLACES.items():
                if (name == power or name.startswith(f"{power}.")) and not allowed(file.name):
                    yield file.finding(node, f"{power} has its own place")


def except_exception(project: Project) -> Iterator[Finding]:
    """Also `suppress(Exception)`."""
    for file in project.package:
        for node in file.nodes:
            caught: list[ast.AST] = []
            if isinstance(node, ast.ExceptHandler):
                caught = [node.type or ast.Name("Exception")]
            elif isinstance(node, ast.Call) and file.chain(node.func).split(".")[-1] == "suppress":
                caught = [*node.args]
            names = {file.chain(part).removeprefix("builtins.") for kind in caught for part in ast.walk(kind)}
            if names & ANYTHING:
                yield file.finding(node, "catches whatever is raised")


LAX_COMMENT = re.compile(r"#\s*(type:\s*ignore(?!\[)|mypy:)")


def type_ignore(project: Project) -> Iterator[Finding]:
    """A checker is silenced for one line and one kind of error, never for a file."""
    for file in project.package:
        for number, line in enumerate(file.text.splitlines(), 1):
            if LAX_COMMENT.search(line):
                yield file.finding(number, "write `# type: ignore[code]` at the line")


def lax_types(settings: Mapping[str, Any]) -> list[str]:
    """What [tool.mypy] of pyproject.toml leaves unchecked: every package is to be strict, with no exception."""
    found = [] if settings.get("strict") is True else ["strict is not true"]
    found += [] if settings.get("files") == ["quire"] else ['files is not ["quire"]']
    found += [f"{key} is set" for key in settings if key.startswith(("disallow", "disable", "ignore", "exclude"))]
    for override in settings.get("overrides", []):
        names = override["module"] if isinstance(override["module"], list) else [override["module"]]
        ours = [name for name in names if name.split(".")[0] in {"quire", "*"}]
        if ours or set(override) - {"module", "ignore_missing_imports"}:
            found.append(f"an override for {', '.join(ours or names)}: {', '.join(sorted(set(override) - {'module'}))}")
    return found


def enum_unique(project: Project) -> Iterator[Finding]:
    for file in project.package:
        for node in file.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            bases, decorators = (
                {file.chain(item).split(".")[-1] for item in items} for items in (node.bases, node.decorator_list)
            )
            if bases & {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"} and "unique" not in decorators:
                yield file.finding(node, f"{node.name} is not @unique")


FAMILIES = "quire/config/families/"
KNOWS_NO_FAMILY = {"core", "config", "planner", "control", "kernels", "compute", "engine"}
"""Names of tool-call formats and of tokenizers in text, serve and bench are other things."""


def family_place(project: Project) -> Iterator[Finding]:
    """A family's name, architecture and model_type stand in its own file only, as a string or as a word."""
    names = {
        word.value.value
        for file in project.package
        if file.name.startswith(FAMILIES)
        for node in file.nodes
        if isinstance(node, ast.Call) and file.chain(node.func).split(".")[-1] == "Family"
        for word in node.keywords
        if word.arg in {"name", "architecture", "model_type"} and isinstance(word.value, ast.Constant)
    }
    modules = {name.removeprefix(FAMILIES).removesuffix(".py") for name in project.files if name.startswith(FAMILIES)}
    modules = {f"quire.config.families.{name}" for name in modules - {"__init__", "family"}}
    for file in project.package:
        if file.package not in KNOWS_NO_FAMILY or file.name.startswith(FAMILIES):
            continue
        for node in file.nodes:
            written = {str(getattr(node, field, "")) for field in ("value", "id", "attr", "name", "arg")}
            if found := {one for one in written if one in names or one.strip("_").lower() in names}:
                yield file.finding(node, f"{found.pop()} is a family: only its file of tables knows it")
        for name, node in project.imports(file):
            if name in modules:
                yield file.finding(node, f"imports {name}, the file of a family")


def op_complete(project: Project) -> Iterator[Finding]:
    """Every operation has a reference, a test, a place in the catalogue and a benchmark case."""
    for name in project.files:
        parts = name.split("/")
        if name != f"quire/kernels/{'/'.join(parts[2:-1])}/op.py" or len(parts) != 4:
            continue
        op = parts[2]
        tests = [one for one in project.files if one.startswith("tests/cpu/kernels/") and op in one.split("/")[-1]]
        missing = {
            "no reference.py": f"quire/kernels/{op}/reference.py" not in project.files,
            "no test in tests/cpu/kernels": not tests,
            "not in quire/kernels/catalog.py": op not in project.catalogue,
            "no case in quire/bench/kernels/registry.py": op not in project.measured,
        }
        yield from (Finding(name, 1, "", message) for message, is_missing in missing.items() if is_missing)


RULES: dict[str, Callable[[Project], Iterator[Finding]]] = {
    "relative-import": relative_import,
    "import-direction": import_direction,
    "engine-interface": engine_interface,
    "attention-parts": attention_parts,
    "import-cycle": import_cycle,
    "import-in-function": import_in_function,
    "import-string": import_string_constant,
    "torch-free": torch_free,
    "no-transformers": no_transformers,
    "size": size,
    "names-and-docstrings": names_and_docstrings,
    "forbidden-statement": forbidden_statement,
    "place": place,
    "except-Exception": except_exception,
    "type-ignore": type_ignore,
    "enum-unique": enum_unique,
    "family-place": family_place,
    "op-complete": op_complete,
}


@dataclasses.dataclass(frozen=True)
class Exemption:
    """One line of exemptions.txt: what a function (of a class for `size`: the class) may do, and why."""

    file: str
    scope: str
    rule: str
    reason: str

    def covers(self, rule: str, finding: Finding) -> bool:
        inside = finding.scope == self.scope or finding.scope.startswith(f"{self.scope}.")
        return rule == self.rule and finding.file == self.file and inside and bool(self.scope)


def read_exemptions(text: str) -> list[Exemption]:
    """Raises ValueError for a line that does not name a file, a function, a rule and a reason."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            words = line.split(maxsplit=3)
            if len(words) != 4 or words[2] not in RULES:
                raise ValueError(f"write 'file function rule reason', the rule one of {sorted(RULES)}: {line!r}")
            found.append(Exemption(*words))
    return found


def useless(exemption: Exemption, file: File | None, findings: list[Finding]) -> str:
    """Why an exemption cannot stay, or ""."""
    scopes = dict(file.scopes) if file else {}
    node = scopes.get(exemption.scope)
    if node is None:
        return "there is no such function"
    if isinstance(node, ast.ClassDef) and exemption.rule != "size":
        return "name a function, not a class"
    if not any(exemption.covers(exemption.rule, finding) for finding in findings):
        return "the rule finds nothing there"
    return ""


def findings_of(project: Project, rule: str) -> list[Finding]:
    """All findings of a rule, which are looked for once."""
    if rule not in project.findings:
        project.findings[rule] = sorted(set(RULES[rule](project)), key=str)
    return project.findings[rule]


def broken(project: Project, rule: str, exemptions: list[Exemption]) -> list[Finding]:
    """Findings of a rule that no exemption covers."""
    found = findings_of(project, rule)
    return [one for one in found if not any(exemption.covers(rule, one) for exemption in exemptions)]
