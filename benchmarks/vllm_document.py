"""Writes docs/vllm.md: `python benchmarks/vllm_document.py`. What becomes here of each name that vLLM has.

vLLM's names come from `vllm_names.json` (see `vllm_names.py`), ours from the package. A test keeps the document equal
to what this makes and every name known.
"""

from __future__ import annotations

import inspect
import json
import pathlib
from typing import Any, Final

from quire.config.engine import EngineConfig
from quire.config.foreign import FOREIGN, State
from quire.config.options import describe
from quire.core.sampling import NOT_HERE as NOT_SAMPLED
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.llm import LLM, NOT_HERE, TAKEN_IN_PART
from quire.serve.config import ServerConfig

ROOT: Final = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT: Final = ROOT / "docs" / "vllm.md"
NAMES: Final = json.loads((ROOT / "benchmarks" / "vllm_names.json").read_text())
HONOURED: Final = "honoured"
MAX_NOTE: Final = 150
"""Characters; what an option means in detail is in docs/options.md."""
Row = tuple[str, str, str]


def option_row(name: str, ours: dict[str, str], written: str) -> Row:
    """State and note of an option; KeyError if nothing is known of it."""
    if name in ours:
        return written, HONOURED, ours[name]
    option = FOREIGN[name]
    if option.state is State.RENAMED:
        return written, HONOURED, f"as `{option.because}`"
    if option.state is State.SAME:
        taken = ", ".join(option.values)
        return written, f"taken: {taken}", f"{option.because}; for other values: {option.instead}"
    return written, option.state.value, option.instead


def flag_rows() -> list[Row]:
    """One row a flag of `vllm serve`."""
    ours = {option.name: _first_sentence(option.meaning) for option in describe(EngineConfig) + describe(ServerConfig)}
    ours["config"] = "A YAML file of options; the command line wins."
    rows = []
    for flag, short in NAMES["serve"].items():
        written = ", ".join(f"`{each}`" for each in (flag, *short))
        rows.append(option_row(flag[2:].replace("-", "_"), ours, written))
    return rows


def argument_rows() -> list[Row]:
    """One row an argument of `LLM(...)`, `EngineArgs` and `AsyncEngineArgs` that is no flag or differs from it."""
    ours = {option.name: _first_sentence(option.meaning) for option in describe(EngineConfig)}
    flags = {flag[2:].replace("-", "_") for flag in NAMES["serve"]}
    names = dict.fromkeys([*NAMES["llm"]["__init__"], *NAMES["engine_args"], *NAMES["async_engine_args"]])
    return [
        option_row(name, ours, f"`{name}`") for name in names if name not in flags or name in NAMES["llm"]["__init__"]
    ]


def method_rows() -> list[Row]:
    """One row a method of `LLM`."""
    rows = []
    for name, parameters in NAMES["llm"].items():
        if name == "__init__":
            continue
        if name in NOT_HERE:
            rows.append((f"`{name}`", State.REFUSED.value, NOT_HERE[name]))
            continue
        rows.append((f"`{name}`", HONOURED, _arguments(name, parameters)))
    return rows


def _arguments(method: str, parameters: list[str]) -> str:
    """Which arguments of a method are taken."""
    lacking = [each for each in parameters if each not in inspect.signature(getattr(LLM, method)).parameters]
    notes = [f"without {', '.join(lacking)}"] if lacking else []
    notes += [f"refused: {', '.join(refused)}"] if (refused := refused_arguments(method)) else []
    notes += [f"{each} only {TAKEN_IN_PART[each]}" for each in parameters if each in TAKEN_IN_PART]
    return "; ".join(notes) or "all arguments"


def refused_arguments(method: str) -> list[str]:
    """Those that a method of `LLM` has in its signature, for None alone."""
    parameters = inspect.signature(getattr(LLM, method)).parameters
    return [name for name, each in parameters.items() if each.annotation in (None, "None")]


def field_rows(names: list[str], struct: Any, others: dict[str, str]) -> list[Row]:
    """One row a field of a struct of vLLM's; KeyError if nothing is known of it."""
    mine = struct.__struct_fields__
    return [
        (f"`{name}`", HONOURED, "") if name in mine else (f"`{name}`", State.REFUSED.value, others[name])
        for name in names
    ]


def _first_sentence(text: str) -> str:
    first = text.split(". ")[0].split("; ")[0].rstrip(".")
    return first if len(first) <= MAX_NOTE else first.split(": ")[0]


def _table(title: str, place: str, rows: list[Row]) -> str:
    counts: dict[str, int] = {}
    for _, state, _ in rows:
        kind = state.split(":")[0]
        counts[kind] = counts.get(kind, 0) + 1
    summed = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    lines = [f"## {title}\n", f"{place} {len(rows)} names: {summed}.\n".lstrip(), "| name | state | |", "|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def document() -> str:
    """The whole document as Markdown."""
    version = NAMES["version"]
    sampling = field_rows(NAMES["sampling_params"], SamplingParams, NOT_SAMPLED)
    parts = [
        "# vLLM's names\n",
        "Generated by `python benchmarks/vllm_document.py`; do not edit. "
        f"vLLM's names are those of {version}, read from its wheel on PyPI by `benchmarks/vllm_names.py`.\n",
        "A name is *honoured*; or *taken* for the values that say what Quire does anyway; or *taken without effect*,",
        "with a warning; or *refused* by name, with what to use instead. In Python None and False are taken for",
        "every option that is not honoured. Flags of llama.cpp are refused with what to use, too.\n",
        _table("Flags of `vllm serve`", "Underscores, short forms, `--no-...`, `--a.b 1` for JSON and `--config FILE` "
               "are read as vLLM reads them.", flag_rows()),
        "",
        _table("Arguments of `LLM(...)`", "With those of `EngineArgs` and `AsyncEngineArgs` that are no flags.",
               argument_rows()),
        "",
        _table("Methods of `LLM`", "", method_rows()),
        "",
        _table("`SamplingParams`", "", sampling),
        "",
        _table("`StructuredOutputsParams`", "", field_rows(NAMES["structured_outputs"], StructuredOutputsParams, {})),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(f"wrote {DOCUMENT.name}")
