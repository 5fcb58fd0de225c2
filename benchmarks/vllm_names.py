"""Names of vLLM's flags and Python arguments, read from one of its wheels without running it.

    pip download vllm==0.26.0 --no-deps --only-binary :all: -d /tmp/vllm
    python benchmarks/vllm_names.py /tmp/vllm/vllm-*.whl

Writes `benchmarks/vllm_names.json`, from which `benchmarks/vllm_document.py` makes docs/vllm.md. Only names are kept.
"""

from __future__ import annotations

import ast
import json
import pathlib
import sys
import zipfile
from typing import Any, Final

TARGET: Final = pathlib.Path(__file__).resolve().parent / "vllm_names.json"
ENGINE: Final = "vllm/engine/arg_utils.py"
SERVER: Final = "vllm/entrypoints/openai/cli_args.py"
LLM: Final = (
    "vllm/entrypoints/llm.py",
    "vllm/entrypoints/pooling/offline.py",
    "vllm/entrypoints/generate/beam_search/offline.py",
)
SAMPLING: Final = "vllm/sampling_params.py"
"""Where 0.26 has them; another version may have moved them (KeyError)."""


class Wheel:
    """The parsed source files of a wheel."""

    def __init__(self, path: pathlib.Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self.version = path.name.split("-")[1]

    def names(self) -> list[str]:
        return self._archive.namelist()

    def tree(self, name: str) -> ast.Module:
        return ast.parse(self._archive.read(name))


def find_class(tree: ast.Module, name: str) -> ast.ClassDef:
    """The class of that name at the top of a module (KeyError)."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise KeyError(name)


def fields(node: ast.ClassDef) -> list[str]:
    """Public annotated fields of a class."""
    found = [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    return [name for name in found if not name.startswith("_")]


def flags(tree: ast.AST) -> dict[str, list[str]]:
    """Long flag → its other spellings, of every `add_argument` with literal names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            long = [word for word in words if word.startswith("--")]
            if long:
                found[long[0]] = [word for word in words if word != long[0]]
    return found


def serve_flags(wheel: Wheel) -> dict[str, list[str]]:
    """Every flag of `vllm serve`: the engine's, the server's, and those of the command itself."""
    found = flags(wheel.tree(ENGINE)) | flags(wheel.tree(SERVER))
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for field in fields(find_class(wheel.tree(SERVER), name)):
            found.setdefault("--" + field.replace("_", "-"), [])
    return dict(sorted(found.items()))


def parameters(function: ast.FunctionDef) -> list[str]:
    """Parameter names without self and `**kwargs`."""
    given = function.args
    return [
        each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg not in ("self", "cls")
    ]


def methods(wheel: Wheel) -> dict[str, list[str]]:
    """Public methods of `LLM` and its bases, and what each takes."""
    found = {}
    for path in LLM:
        if path not in wheel.names():
            continue
        for node in wheel.tree(path).body:
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and (each.name == "__init__" or not each.name.startswith("_")):
                        found.setdefault(each.name, parameters(each))
    return dict(sorted(found.items()))


def read(path: pathlib.Path) -> dict[str, Any]:
    """What the data file holds."""
    wheel = Wheel(path)
    sampling = find_class(wheel.tree(SAMPLING), "SamplingParams")
    return {
        "version": wheel.version,
        "serve": serve_flags(wheel),
        "engine_args": fields(find_class(wheel.tree(ENGINE), "EngineArgs")),
        "async_engine_args": fields(find_class(wheel.tree(ENGINE), "AsyncEngineArgs")),
        "llm": methods(wheel),
        "sampling_params": fields(sampling),
        "structured_outputs": fields(find_class(wheel.tree(SAMPLING), "StructuredOutputsParams")),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(read(pathlib.Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET.name}")
