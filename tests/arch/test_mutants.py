"""Each rule catches its mutants: small projects with one fault each, and beside them what is allowed."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from project import Finding, of_texts
from rules import MAX_FILE_LINES, RULES, broken, lax_types, read_exemptions, useless

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOC = '"""What it holds."""\n'
INIT = {"quire/__init__.py": '_PLACES = {"LLM": "quire.engine.llm", "QuireError": "quire.core.errors"}\n'}
PAGES, OP = "quire/control/pages.py", "quire/kernels/turn/op.py"
FROM_ATTENTION = "from quire.kernels.attention"


def function(n_lines: int) -> str:
    return "def long():\n" + "    pass\n" * (n_lines - 1)


# (rule, file, its text, the line that is found)
MUTANTS = [
    ("relative-import", PAGES, "from . import tree\n", 1),
    ("relative-import", PAGES, "def find():\n    from .tree import Node\n", 2),
    ("import-direction", PAGES, "from quire.engine.llm import LLM\n", 1),
    ("import-direction", PAGES, "from quire import engine\n", 1),
    ("import-direction", PAGES, "from quire import LLM\n", 1),
    ("import-direction", PAGES, "from quire import LLM as Model\n", 1),
    ("import-direction", PAGES, "def find():\n    from quire import LLM\n", 2),
    ("import-direction", PAGES, "import quire\nquire.LLM\n", 1),
    ("import-direction", PAGES, "import quire as q\nq.LLM\n", 1),
    ("import-direction", PAGES, "from quire import *\n", 1),
    ("import-direction", PAGES, 'import importlib\nimportlib.import_module("quire.engine.llm")\n', 2),
    ("import-direction", PAGES, 'from importlib import import_module as load\nload("quire.kernels.jit")\n', 2),
    ("import-direction", PAGES, 'import importlib\nimportlib.import_module(name="quire.engine.llm")\n', 2),
    ("import-direction", PAGES, '__import__("quire.compute")\n', 1),
    ("import-direction", "quire/core/plan.py", "import quire.control.pages\n", 1),
    ("import-direction", "quire/serve/app.py", "from quire.compute.device import cuda\n", 1),
    ("engine-interface", "quire/serve/app.py", "from quire.engine.core import EngineCore\n", 1),
    ("engine-interface", "quire/serve/app.py", "from quire.engine import supervisor\n", 1),
    ("engine-interface", "quire/serve/app.py", "import quire.engine\n", 1),
    ("engine-interface", "quire/serve/app.py", "def f():\n    from quire.engine.child import Child\n", 2),
    ("attention-parts", "quire/kernels/attention/triton/launcher.py", f"{FROM_ATTENTION}.cpu import work\n", 1),
    ("attention-parts", "quire/kernels/attention/schedule/tiles.py", f"{FROM_ATTENTION}.variant import Variant\n", 1),
    ("attention-parts", "quire/kernels/attention/variant/lowering.py", f"{FROM_ATTENTION}.schedule import plan\n", 1),
    ("attention-parts", "quire/kernels/attention/cpu/launcher.py", f"{FROM_ATTENTION} import op\n", 1),
    ("attention-parts", "quire/kernels/attention/rocm/launcher.py", f"{FROM_ATTENTION}.schedule import plan\n", 1),
    ("import-cycle", PAGES, "from quire.control import pool\n", 1),
    ("import-cycle", PAGES, "try:\n    from quire.control.pool import Pool\nexcept ImportError:\n    pass\n", 2),
    ("import-cycle", PAGES, 'import importlib\nclass A:\n    x = importlib.import_module("quire.control.pool")\n', 3),
    ("import-in-function", PAGES, "def find():\n    import quire.core.errors\n", 2),
    ("import-in-function", PAGES, "def find():\n    from quire import QuireError\n", 2),
    ("import-in-function", PAGES, 'import importlib\ndef f():\n    importlib.import_module("quire.core.errors")\n', 3),
    ("import-string", PAGES, 'import importlib\nimportlib.import_module("quire." + "engine.llm")\n', 2),
    ("import-string", PAGES, "import importlib\nload = importlib.import_module\n", 2),
    ("import-string", PAGES, "list(map(__import__, names))\n", 1),
    ("import-string", PAGES, 'import importlib\ngetattr(importlib, "import_module")(name)\n', 2),
    ("torch-free", PAGES, "import torch\n", 1),
    ("torch-free", PAGES, "def find():\n    from torch.nn import Linear\n", 2),
    ("torch-free", PAGES, 'import importlib\ntorch = importlib.import_module("torch")\n', 2),
    ("torch-free", "quire/text/stop.py", '__import__("torch.cuda")\n', 1),
    ("no-transformers", "quire/engine/llm.py", "def load():\n    import transformers\n", 2),
    ("no-transformers", "quire/engine/llm.py", '__import__("transformers.models")\n', 1),
    ("size", PAGES, "\n" * (MAX_FILE_LINES["quire"] + 1), 1),
    ("size", PAGES, "\n" + function(81), 2),
    ("size", PAGES, "class Wide:\n" + "    x = 1\n" * 300, 1),
    ("size", "quire/serve/page/page.js", "\n" * 401, 1),
    ("size", "csrc/cuda/decode.cu", "\n" * 501, 1),
    ("size", "csrc/cuda/decode/consumer.h", "\n" * 501, 1),
    ("size", "csrc/cpu/linear.cpp", "\n" * 501, 1),
    ("size", "tests/cpu/test_one.py", "\n" * 601, 1),
    ("size", "tests/cpu/test_one.py", function(81), 1),
    ("size", "benchmarks/online.py", "\n" * 401, 1),
    ("size", "demo/train.py", "\n" * 401, 1),
    ("size", "examples/own.py", "\n" * 401, 1),
    ("names-and-docstrings", "quire/control/utils.py", DOC, 1),
    ("names-and-docstrings", "quire/control/pages_v2.py", DOC, 1),
    ("names-and-docstrings", PAGES, "x = 1\n", 1),
    ("names-and-docstrings", PAGES, '"""' + "A line.\n" * 11 + '"""\n', 1),
    ("forbidden-statement", PAGES, "def find():\n    global x\n    x = 1\n", 2),
    ("forbidden-statement", PAGES, 'eval("1")\n', 1),
    ("forbidden-statement", PAGES, 'import builtins\nbuiltins.exec("1")\n', 2),
    ("forbidden-statement", PAGES, 'getattr(__builtins__, "x")\nfrom builtins import eval as run\nrun("1")\n', 3),
    ("forbidden-statement", PAGES, "from pickle import loads\n", 1),
    ("forbidden-statement", PAGES, '__import__("marshal")\n', 1),
    ("place", "quire/compute/runner/run.py", "import torch\ntorch.cuda.synchronize()\n", 2),
    ("place", "quire/compute/runner/run.py", "import torch as t\nt.cuda.synchronize()\n", 2),
    ("place", "quire/compute/runner/run.py", "from torch import cuda\n", 1),
    ("place", "quire/compute/runner/run.py", 'import torch\ngetattr(torch, "cuda").synchronize()\n', 2),
    ("place", "quire/compute/runner/run.py", "import torch.distributed as dist\n", 1),
    ("place", PAGES, 'import os\nos.environ["HOME"]\n', 2),
    ("place", PAGES, "from os import getenv\n", 1),
    ("place", "quire/engine/build.py", '__import__("ray")\n', 1),
    ("except-Exception", PAGES, "try:\n    pass\nexcept Exception:\n    pass\n", 3),
    ("except-Exception", PAGES, "try:\n    pass\nexcept (ValueError, BaseException):\n    pass\n", 3),
    ("except-Exception", PAGES, "try:\n    pass\nexcept:\n    pass\n", 3),
    ("except-Exception", PAGES, "try:\n    pass\nexcept* Exception:\n    pass\n", 3),
    ("except-Exception", PAGES, "import contextlib\nwith contextlib.suppress(Exception):\n    pass\n", 2),
    ("type-ignore", PAGES, "x = 1  # type: ignore\n", 1),
    ("type-ignore", PAGES, "# mypy: ignore-errors\n", 1),
    ("enum-unique", PAGES, "import enum\nclass Kind(enum.IntEnum):\n    A = 1\n", 2),
    ("enum-unique", PAGES, "import enum\nclass Kind(str, enum.Enum):\n    A = 1\n", 2),
    ("family-place", "quire/compute/worker.py", 'if arch.model_type == "bloom_text":\n    pass\n', 1),
    ("family-place", "quire/planner/memory.py", 'KNOWN = {"BloomForCausalLM": 2}\n', 1),
    ("family-place", "quire/compute/layers/norm.py", "def f(x, bloom):\n    return x\n", 1),
    ("family-place", "quire/kernels/turn/op.py", "\nclass Bloom:\n    pass\n", 2),
    ("family-place", "quire/config/arch.py", "from quire.config.families.bloom import bloom\n", 1),
    ("op-complete", OP, DOC, 1),
]

ALLOWED = [
    ("attention-parts", "quire/kernels/attention/cpu/launcher.py", f"{FROM_ATTENTION}.schedule.plan import Layout\n"),
    ("attention-parts", "quire/kernels/attention/op.py", f"{FROM_ATTENTION}.cpu import work\n"),
    ("type-ignore", PAGES, "x = 1  # type: ignore[misc]  # why\n"),
    ("import-direction", PAGES, "from quire import QuireError, __version__\nimport quire.core.plan\n"),
    ("import-direction", "quire/cli/main.py", "from quire import LLM\n"),
    ("import-cycle", PAGES, "if TYPE_CHECKING:\n    from quire.control import pool\n"),
    ("import-cycle", PAGES, "def find():\n    from quire.control import pool\n"),
    ("import-in-function", "quire/cli/main.py", "def run():\n    from quire.engine.llm import LLM\n"),
    ("import-in-function", PAGES, "def find():\n    import json\n"),
    ("import-string", PAGES, 'import importlib\nimportlib.import_module("readline")\n'),
    ("torch-free", "quire/compute/runner/run.py", "import torch\n"),
    ("size", PAGES, "\n" * 320 + function(80)),
    ("size", "csrc/cuda/decode.cu", "\n" * 500),
    ("place", "quire/compute/device/cuda.py", "import torch\ntorch.cuda.synchronize()\n"),
    ("place", "quire/core/env.py", "import os\nos.environ\n"),
    ("except-Exception", PAGES, "try:\n    pass\nexcept (ValueError, OSError):\n    pass\n"),
    ("enum-unique", PAGES, "import enum\n@enum.unique\nclass Kind(enum.Enum):\n    A = 1\n"),
    ("family-place", "quire/config/families/rose.py", 'KNOWN = {"BloomForCausalLM": 2}\n'),
    ("family-place", "quire/text/tool_calls.py", 'FORMATS = {"bloom": 2}\n'),
    ("family-place", "quire/compute/worker.py", '"""As bloom does."""\nfrom quire.config import families\n'),
]


def found(rule: str, file: str, text: str) -> list[Finding]:
    others = {
        **INIT,
        "quire/control/__init__.py": "",
        "quire/control/pool.py": DOC + "from quire.control import pages\n",
        "quire/config/families/bloom.py": (
            'FAMILIES = (Family(name="bloom", architecture="BloomForCausalLM", model_type="bloom_text"),)\n'
        ),
    }
    return list(RULES[rule](of_texts({**others, file: text})))


def test_every_rule_has_a_mutant() -> None:
    assert {rule for rule, *_ in MUTANTS} == set(RULES)


@pytest.mark.parametrize(("rule", "file", "text", "line"), MUTANTS, ids=[f"{m[0]}-{n}" for n, m in enumerate(MUTANTS)])
def test_a_mutant_is_caught(rule: str, file: str, text: str, line: int) -> None:
    assert (file, line) in {(one.file, one.line) for one in found(rule, file, text)}


@pytest.mark.parametrize(("rule", "file", "text"), ALLOWED, ids=[f"{m[0]}-{n}" for n, m in enumerate(ALLOWED)])
def test_what_is_allowed_is_not_found(rule: str, file: str, text: str) -> None:
    assert not found(rule, file, text)


def test_an_operation_is_complete_only_with_all_its_parts() -> None:
    texts = {
        OP: DOC,
        "quire/kernels/turn/reference.py": DOC,
        "tests/cpu/kernels/turn/test_turn.py": "",
    }
    known = {"catalogue": frozenset({"turn"}), "measured": frozenset({"turn"})}
    assert not list(RULES["op-complete"](of_texts(texts, **known)))
    for name in [*texts][1:]:
        fewer = {other: text for other, text in texts.items() if other != name}
        assert len(list(RULES["op-complete"](of_texts(fewer, **known)))) == 1
    for name in known:
        assert len(list(RULES["op-complete"](of_texts(texts, **{**known, name: frozenset()})))) == 1


STRICT: dict[str, Any] = {"strict": True, "files": ["quire"]}


@pytest.mark.parametrize(
    "change",
    [
        {"strict": False},
        {"files": ["quire/core", "quire/control"]},
        {"disallow_untyped_defs": False},
        {"exclude": ["quire/kernels/"]},
        {"overrides": [{"module": ["quire.kernels.*"], "ignore_errors": True}]},
        {"overrides": [{"module": "*", "ignore_missing_imports": True}]},
        {"overrides": [{"module": ["tqdm.*", "quire.compute.*"], "ignore_missing_imports": True}]},
        {"overrides": [{"module": ["yaml.*"], "follow_imports": "skip"}]},
    ],
)
def test_a_package_that_is_not_strict_is_found(change: dict[str, Any]) -> None:
    assert lax_types(STRICT) == []
    assert lax_types({**STRICT, "overrides": [{"module": ["yaml.*"], "ignore_missing_imports": True}]}) == []
    assert len(lax_types({**STRICT, **change})) == 1


CAUGHT = "def save():\n    try:\n        pass\n    except Exception:\n        pass\n"
"""Two functions, of which one may catch anything."""


def test_an_exemption_is_for_one_function() -> None:
    project = of_texts({PAGES: CAUGHT + CAUGHT.replace("save", "load") + "class A:\n" + "    x = 1\n"})
    (exemption,) = read_exemptions(f"# file function rule reason\n\n{PAGES} save except-Exception it may\n")
    assert [one.scope for one in broken(project, "except-Exception", [exemption])] == ["load"]
    (other,) = read_exemptions(f"{PAGES} save place it may")
    assert len(broken(project, "except-Exception", [other])) == 2


def test_an_exemption_covers_what_is_inside_its_function_only() -> None:
    inner = "def save():\n" + "".join(f"    {line}\n" for line in CAUGHT.replace("save", "inner").splitlines())
    project = of_texts({PAGES: inner + CAUGHT.replace("save", "save_all")})
    (exemption,) = read_exemptions(f"{PAGES} save except-Exception it may")
    assert [one.scope for one in broken(project, "except-Exception", [exemption])] == ["save_all"]


@pytest.mark.parametrize(
    "line",
    [f"{PAGES} save except-Exception", f"{PAGES} except-Exception it may", f"{PAGES} save no-such-rule it may"],
)
def test_a_line_of_exemptions_names_function_rule_and_reason(line: str) -> None:
    with pytest.raises(ValueError, match="file function rule reason"):
        read_exemptions(line)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{PAGES} save except-Exception it may", ""),
        (f"{PAGES} gone except-Exception it may", "there is no such function"),
        ("quire/control/gone.py save except-Exception it may", "there is no such function"),
        (f"{PAGES} Holder except-Exception it may", "name a function, not a class"),
        (f"{PAGES} quiet except-Exception it may", "the rule finds nothing there"),
    ],
)
def test_an_exemption_that_is_not_needed_is_found(text: str, why: str) -> None:
    holder = "class Holder:\n" + "".join(f"    {line}\n" for line in CAUGHT.splitlines())
    project = of_texts({PAGES: CAUGHT + "def quiet():\n    pass\n" + holder})
    (exemption,) = read_exemptions(text)
    findings = list(RULES[exemption.rule](project))
    assert useless(exemption, project.files.get(exemption.file), findings) == why


def test_a_finding_at_the_top_of_a_file_cannot_be_exempted() -> None:
    """No line of exemptions.txt can name a whole file."""
    project = of_texts({PAGES: "import os\nos.environ\n"})
    for scope in ("-", "*", "pages", "<module>"):
        assert len(broken(project, "place", read_exemptions(f"{PAGES} {scope} place it may"))) == 1


def test_the_real_tree_is_no_way_around() -> None:
    """The same faults put into a file of the repository."""
    texts = {name: (ROOT / name).read_text() for name in ("quire/__init__.py", "quire/control/scheduler.py")}
    name, last = "quire/control/scheduler.py", len(texts["quire/control/scheduler.py"].splitlines())
    faults = {
        "import-direction": "from quire import LLM",
        "torch-free": 'import importlib; importlib.import_module("torch")',
        "place": "import os; os.environ",
    }
    for rule, line in faults.items():
        assert not list(RULES[rule](of_texts(texts)))
        changed = of_texts({**texts, name: f"{texts[name]}{line}\n"})
        assert [(one.file, one.line) for one in RULES[rule](changed)] == [(name, last + 1)]
