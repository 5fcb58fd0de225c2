"""Engines of several ranks for experiments: models that need no file, prompts, times, tables and records.

Owns what `tensor_parallel_table`, `rank_traffic`, `context_parallel` and `pipeline_bubbles` have in common. On a CPU
ranks speak through gloo and share this machine's cores, so that its times say nothing of GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from quire import LLM, SamplingParams
from quire.bench.machine import gpus
from quire.bench.report import build_report, check_report_path, write_report
from quire.bench.shape import FOLDER, PREFIX
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.accelerators import accelerator_seen
from quire.planner.cost import CostModel, calibrated
from quire.planner.formats import formats_named

SMALL_LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 1 << 17,
}  # fmt: skip
SMALL_EXPERTS: Final = {
    **SMALL_LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2, "intermediate_size": 128,
}  # fmt: skip
DTYPES: Final = {"cpu": "float32", "cuda": "bfloat16"}

Row = dict[str, Any]


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Those that all have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a rank, through NCCL")
    parser.add_argument(
        "--output", help="JSON with commit, hardware and command; '': none; default: in benchmarks/results"
    )
    return parser


def numbers(text: str) -> list[int]:
    """'1,2,4'."""
    return [int(one) for one in text.split(",")]


@contextlib.contextmanager
def model_folder(model: str | Mapping[str, Any]) -> Iterator[str]:
    """A folder with a config.json: of a bundled shape, of a path, or of a description."""
    if isinstance(model, str):
        yield str(FOLDER / model.removeprefix(PREFIX)) if model.startswith(PREFIX) else model
        return
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(model))
        yield folder


def engine(folder: str, device: str, **options: Any) -> LLM:
    """With random weights, no tokenizer, no prefix cache, one thread a rank on a CPU."""
    values = {
        "device": device, "dtype": DTYPES[device], "load_format": "dummy", "skip_tokenizer_init": True,
        "enable_prefix_caching": False, **({"num_threads": 1} if device == "cpu" else {}), **options,
    }  # fmt: skip
    return LLM(model=folder, **values)


def prompts_of(n: int, length: int, vocab_size: int = 509) -> list[Any]:
    """No two begin alike."""
    return [
        {"prompt_token_ids": [(i * i + 7 * i + 13 * number) % vocab_size + 1 for i in range(length)]}
        for number in range(n)
    ]


def took_s(llm: LLM, prompts: Sequence[Any], n_out: int, **params: Any) -> float:
    """Until all have n_out tokens."""
    chosen = SamplingParams(
        **{"temperature": 0.0, "max_tokens": n_out, "ignore_eos": True, "detokenize": False} | params
    )
    begin_s = time.perf_counter()
    llm.generate(list(prompts), chosen, use_tqdm=False)
    return time.perf_counter() - begin_s


def expected(folder: str, device: str, mesh: Mesh) -> CostModel | None:
    """The planner's cost of a step on the GPUs of this machine; None: they are not in its table, or there are none."""
    found = gpus() if device == "cuda" else []
    accelerator = accelerator_seen(found[0]["name"]) if found else None
    if accelerator is None:
        return None
    dtype = DTYPES[device]
    return calibrated(
        read_arch(pathlib.Path(folder)), accelerator, formats=formats_named(dtype, dtype, dtype), mesh=mesh
    )


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> Iterator[str]:
    """columns: key of a row → how it is called. What a row lacks, or has as None, is a dash."""
    cells = [list(columns.values())] + [[_shown(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    for line in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def say(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Print the table."""
    for line in table(rows, columns):
        print(line, flush=True)


@contextlib.contextmanager
def recording(name: str, options: argparse.Namespace, **more: object) -> Iterator[list[Row]]:
    """Rows to be filled; they are written in the end, also where something failed on the way. ConfigError, before
    anything is measured, where they cannot be written."""
    path, rows = options.output, list[Row]()
    if path is None:
        path = f"benchmarks/results/{name}_{options.device}.json"
    if path:
        check_report_path(path, "--output")
    try:
        yield rows
    finally:
        if path and rows:
            load = {"load_average": [round(one, 2) for one in os.getloadavg()]} if options.device == "cpu" else {}
            write_report(path, build_report(name, vars(options), {**load, **more, "rows": rows}))
            print(f"written to {path}")
