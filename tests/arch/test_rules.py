"""The repository is held to the rules of rules.py, and to those that only running it shows.

A rule that fails names the file, the line, the function and the limit. What each rule catches is in test_mutants.py.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import subprocess
import sys
import tomllib
import typing

import msgspec
import pytest
from project import Project, of_folder
from rules import RULES, TORCH_FREE, broken, findings_of, lax_types, read_exemptions, useless

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXEMPTIONS = read_exemptions(pathlib.Path(__file__).with_name("exemptions.txt").read_text())

MAX_STEP_LINES = 40
MAX_IMPORT_S = 0.15
MAX_CONFIG_FIELDS, MAX_ENVIRONMENT_VARIABLES = 80, 12


@pytest.fixture(scope="module")
def project() -> Project:
    listed = importlib.import_module("quire.kernels.catalog").OPS
    measured = importlib.import_module("quire.bench.kernels.registry").OPS
    return of_folder(ROOT, catalogue=frozenset(listed), measured=frozenset(measured))


@pytest.mark.parametrize("rule", RULES)
def test_the_repository_keeps_the_rule(project: Project, rule: str) -> None:
    found = broken(project, rule, EXEMPTIONS)
    assert not found, f"{rule}:\n" + "\n".join(map(str, found))


def test_every_exemption_is_needed(project: Project) -> None:
    """It names a function that is there, and without it the rule would find something in it."""
    found = {rule: findings_of(project, rule) for rule in {exemption.rule for exemption in EXEMPTIONS}}
    faults = {one: useless(one, project.files.get(one.file), found[one.rule]) for one in EXEMPTIONS}
    assert not any(faults.values()), "\n".join(f"{one.file} {one.scope}: {why}" for one, why in faults.items() if why)


def test_every_package_is_strictly_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert lax_types(settings) == []


def test_the_rules_look_at_every_place(project: Project) -> None:
    looked_at = {f"{name.split('/')[0]}/{name.split('.')[-1]}" for name in project.files}
    assert {"quire/py", "quire/js", "quire/css", "csrc/cu", "csrc/cpp", "csrc/h"} <= looked_at
    assert {"tests/py", "tests/h", "benchmarks/py", "demo/py", "examples/py"} <= looked_at
    assert project.public["LLM"] == "quire.engine.llm"


def test_config_budget() -> None:
    engine = importlib.import_module("quire.config.engine")
    env = importlib.import_module("quire.core.env")
    assert len(engine.EngineConfig.__struct_fields__) <= MAX_CONFIG_FIELDS
    assert len(env.VARIABLES) <= MAX_ENVIRONMENT_VARIABLES


@pytest.mark.parametrize("place", ["quire.config.engine.EngineConfig", "quire.serve.config.ServerConfig"])
def test_every_option_says_what_it_is(place: str) -> None:
    module, _, name = place.rpartition(".")
    hints = typing.get_type_hints(getattr(importlib.import_module(module), name), include_extras=True)
    bare = [field for field, hint in hints.items() if not described(hint)]
    assert hints
    assert not bare, f"{name}: no description for {bare}"


def described(hint: object) -> bool:
    metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return any((meta.description or "").strip() for meta in metas)


def test_the_step_stays_readable() -> None:
    step = importlib.import_module("quire.engine.core").EngineCore.step
    assert len(inspect.getsourcelines(step)[0]) < MAX_STEP_LINES


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.parametrize("package", TORCH_FREE)
def test_torch_free_packages_import_without_torch(project: Project, package: str) -> None:
    modules = [file.module for file in project.package if file.package == package]
    done = run_python(
        f"import sys, importlib; sys.modules['torch'] = None\nfor name in {modules!r}: importlib.import_module(name)"
    )
    assert done.returncode == 0, done.stderr


def test_import_quire_is_quick_and_lazy() -> None:
    done = run_python(
        "import sys, quire; bad = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    assert done.returncode == 0, done.stderr


def test_import_quire_takes_little_time() -> None:
    """The best of five, so that a busy machine does not decide."""
    code = "import time; began_s = time.perf_counter(); import quire; print(time.perf_counter() - began_s)"
    times_s = [float(run_python(code).stdout) for _ in range(5)]
    assert min(times_s) < MAX_IMPORT_S, f"import quire takes {min(times_s):.3f} s, limit {MAX_IMPORT_S} s"


def test_public_names() -> None:
    quire = importlib.import_module("quire")
    assert sorted(quire.__all__) == sorted(
        [
            "LLM",
            "AsyncLLM",
            "SamplingParams",
            "RequestOutput",
            "BeamSearchOutput",
            "BeamSearchParams",
            "BeamSearchSequence",
            "CompletionOutput",
            "EngineConfig",
            "LoRARequest",
            "QuireError",
            "StructuredOutputsParams",
            "AsyncEngineArgs",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "EngineArgs",
            "PoolingOutput",
            "PoolingParams",
            "PoolingRequestOutput",
            "PromptType",
            "ScoringOutput",
            "ScoringRequestOutput",
            "TextPrompt",
            "TokensPrompt",
            "__version__",
        ]
    )
    for name in quire.__all__:
        assert getattr(quire, name) is not None
