"""What the demo model loses in each format of quantised checkpoints that Quire reads: held-out text and tasks.

    python -m benchmarks.held_out_texts FOLDER --bytes 20000 --examples 8
    python -m benchmarks.format_quality FOLDER --packages P    # P: see benchmarks/peers/codings.py

Each format is written to a folder by the package that it is from, and loaded as users load it. Values are rounded to
the nearest: what calibration gains is in `quantize_methods`. Where a CPU keeps codes and so rounds activations too,
bits per byte are measured a second time with `--quantization none`. A format that is refused is recorded with the
message.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from benchmarks.held_out_texts import KINDS
from benchmarks.peers import codings, models
from benchmarks.peers.codings import Written
from demo.evaluate import MAX_NEW_TOKENS, MODELS
from quire import LLM
from quire.bench.machine import n_cores
from quire.bench.report import build_report, write_report
from quire.bench.tasks import Task, answer_tasks, read_tasks
from quire.bench.tradeoffs import bits_per_byte, read_texts
from quire.core.errors import ConfigError, LoadError

RESULT = pathlib.Path(__file__).with_name("results") / "format_quality.json"
WINDOW = 1024
N_PAGES = 1600
Store = Callable[[torch.Tensor], Written]
PACKED, NVFP4, FLOAT = "pack-quantized", "nvfp4-pack-quantized", "float-quantized"
CODINGS: dict[str, Store] = {
    "fp8, channels": functools.partial(codings.compressed, form=FLOAT, preset="FP8_DYNAMIC"),
    "fp8, tensor": functools.partial(codings.compressed, form=FLOAT, num_bits=8, type="float", strategy="tensor"),
    "fp8, blocks of 128 x 128": codings.fp8_blocks,
    "int8, channels": functools.partial(codings.compressed, form="int-quantized", preset="W8A8"),
    "compressed-tensors int8, channels": functools.partial(codings.compressed, form=PACKED, preset="W8A16"),
    "compressed-tensors int4, g128": functools.partial(codings.compressed, form=PACKED, preset="W4A16"),
    "compressed-tensors int4, g128, zeros": functools.partial(codings.compressed, form=PACKED, preset="W4A16_ASYM"),
    "gptq 8 bits, g128": lambda weight: codings.gptq(weight.half(), 8, 128),
    "gptq 4 bits, g128": lambda weight: codings.gptq(weight.half(), 4, 128),
    "awq 4 bits, g128": lambda weight: codings.awq(weight.half(), 128),
    "nf4": functools.partial(codings.nf4, nested=False),
    "nf4, double": functools.partial(codings.nf4, nested=True),
    "nvfp4, compressed-tensors": functools.partial(codings.compressed, form=NVFP4, preset="NVFP4"),
    "nvfp4, modelopt": codings.nvfp4_modelopt,
    "mxfp4, tensors of gpt-oss": codings.mxfp4_blocks,
    "mxfp4, compressed-tensors": functools.partial(
        codings.compressed, form="mxfp4-pack-quantized", preset="MXFP4A16"
    ),
}  # fmt: skip
"""Name → how a matrix is stored."""
BLOCKS = (
    "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "IQ4_NL", "IQ4_XS", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K", "MXFP4",
)  # fmt: skip
"""Types of GGUF."""
FILE_TYPES = {"Q2_K": "Q2_K_S", "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "MXFP4": "MXFP4_MOE"}
"""Where llama.cpp calls a file otherwise than most of its matrices."""


class WeightError:
    """How far numbers are from the weights, over all matrices."""

    def __init__(self) -> None:
        self._squares = self._of_weights = 0.0

    def add(self, weight: torch.Tensor, decoded: torch.Tensor) -> None:
        """One matrix."""
        self._squares += float((weight.float() - decoded.float()).square().sum())
        self._of_weights += float(weight.float().square().sum())

    @property
    def relative(self) -> float:
        """Root of the mean square, by that of the weights."""
        return float((self._squares / self._of_weights) ** 0.5)


@dataclasses.dataclass(frozen=True)
class Made:
    """A checkpoint in a format."""

    path: pathlib.Path
    """A folder, or a file of GGUF."""
    n_bytes: int
    """Of the file that has the weights."""
    error: float
    """Of its matrices, `WeightError.relative`."""


def coded_checkpoint(source: pathlib.Path, target: pathlib.Path, store: Store) -> Made:
    """The checkpoint in `source` with its projections stored otherwise."""
    target.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    config, error = {}, WeightError()
    for name, weight in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj") or weight.dim() != 2:
            tensors[name] = weight
            continue
        config, stored, decoded = store(weight)
        error.add(weight, decoded)
        ends = {end if end.startswith("_") else f".{end}": one for end, one in stored.items()}
        tensors |= {stem + end: one.contiguous().clone() for end, one in ends.items()}
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    described = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (target / "config.json").write_text(json.dumps(described))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return Made(target, (target / "model.safetensors").stat().st_size, error.relative)


def gguf_file(source: pathlib.Path, target: pathlib.Path, kind: str) -> Made:
    """The checkpoint in `source` as a file of GGUF with all its matrices in one type; a tied embedding is in 6 bits at
    least, as llama.cpp leaves it."""
    error = WeightError()

    def add(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor) -> None:
        own = kind if not name.startswith("token_embd") or kind == "Q8_0" else "Q6_K"
        if weight.dim() == 1:
            models.add_weight(writer, name, weight)
            return
        blocks, decoded = codings.gguf_blocks(weight, own)
        if own == kind:
            error.add(weight, decoded)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[own])

    models.write_gguf(source, target, add, FILE_TYPES.get(kind, kind))
    return Made(target, target.stat().st_size, error.relative)


@contextlib.contextmanager
def loaded(path: pathlib.Path, threads: int, **options: Any) -> Iterator[LLM]:
    """The engine, as users make it."""
    llm = LLM(str(path), device="cpu", num_threads=threads, num_gpu_blocks_override=N_PAGES, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def held_as(llm: LLM) -> str:
    """What the layers' matrices are in memory."""
    model = llm.engine.executor.worker.model  # type: ignore[attr-defined]
    names = dict.fromkeys(linear.scheme.name for layer in model.layers for linear in layer.linears)
    return ", ".join(names)


def measure(
    path: pathlib.Path, texts: Mapping[str, str], tasks: Sequence[Task], threads: int, **options: Any
) -> dict[str, Any]:
    """Bits per byte of each text, and right replies; without tasks those are left out. Raises ConfigError or
    LoadError where the checkpoint is refused."""
    with loaded(path, threads, **options) as llm:
        bits = {name: bits_per_byte(llm, text, WINDOW) for name, text in texts.items()}
        found = {"held_as": held_as(llm), "bits_per_byte": bits, "mean": sum(bits.values()) / len(bits)}
        if tasks:
            scores = answer_tasks(llm, tasks, MAX_NEW_TOKENS)
            right, asked = (sum(column) for column in zip(*scores.values(), strict=True))
            found |= {"accuracy": right / asked, "tasks": scores}
    return found


def rows(
    source: pathlib.Path, place: pathlib.Path, texts: Mapping[str, str], tasks: Sequence[Task], threads: int,
    coded: Mapping[str, Store] = CODINGS, blocks: Sequence[str] = BLOCKS,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:  # fmt: skip
    """(figures by format, what was said of each that was refused); checkpoints are made in `place`, one at a time."""
    figures: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    size = (source / "model.safetensors").stat().st_size
    for dtype in ("bfloat16", "float32"):
        figures[dtype] = {"file_bytes": size, **measure(source, texts, tasks, threads, dtype=dtype)}
        print(dtype, json.dumps(figures[dtype]), flush=True)
    decoded = figures["bfloat16"]["held_as"]
    makers: dict[str, Callable[[pathlib.Path], Made]] = {
        name: functools.partial(coded_checkpoint, source, store=store) for name, store in coded.items()
    }
    makers |= {
        f"gguf {kind}": lambda target, kind=kind: gguf_file(source, target.with_suffix(".gguf"), kind)
        for kind in blocks
    }  # fmt: skip
    for number, (name, make) in enumerate(makers.items()):
        begin_s = time.perf_counter()
        made = make(place / str(number))
        try:
            row = measure(made.path, texts, tasks, threads)
            if row["held_as"] != decoded:
                row["weights_alone"] = measure(made.path, texts, (), threads, quantization="none")
        except (ConfigError, LoadError) as error:
            refused[name] = error.message.replace(str(made.path), "CHECKPOINT")
            print(name, "is refused:", refused[name], flush=True)
        else:
            figures[name] = {"file_bytes": made.n_bytes, "error_of_weights": made.error, **row}
            took_s = time.perf_counter() - begin_s
            print(f"{name} ({took_s:.0f} s)", json.dumps(figures[name]), flush=True)
        if made.path.is_dir():
            shutil.rmtree(made.path)
        else:
            made.path.unlink()
    return figures, refused


def table(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown, as docs/quantization.md has them."""
    plain = figures["bfloat16"]
    lines = [
        "| format | MiB | error of weights | bits per byte | change | weights alone | tasks | on a CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in figures.items():
        error = f"{row['error_of_weights']:.1%}" if "error_of_weights" in row else "-"
        alone = f"{row['weights_alone']['mean'] / plain['mean'] - 1:+.1%}" if "weights_alone" in row else "same"
        change = f"{row['mean'] / plain['mean'] - 1:+.1%}"
        cells = (
            name, f"{row['file_bytes'] / 2**20:.1f}", error, f"{row['mean']:.3f}", change, alone,
            f"{row['accuracy']:.1%}", row["held_as"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="of benchmarks.held_out_texts")
    parser.add_argument("--packages", default="", help="folder of packages that write formats")
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--only", default="", help="formats whose name has this in it")
    parser.add_argument("--output", default=str(RESULT))
    args = parser.parse_args()
    if args.packages:
        sys.path.append(args.packages)
    texts = read_texts([str(args.folder / f"{kind}.txt") for kind in KINDS])
    tasks = read_tasks(str(args.folder / "tasks.jsonl"))
    coded = {name: store for name, store in CODINGS.items() if args.only in name}
    blocks = [kind for kind in BLOCKS if args.only in f"gguf {kind}"]
    with tempfile.TemporaryDirectory() as name:
        figures, refused = rows(MODELS / "demo", pathlib.Path(name), texts, tasks, args.threads, coded, blocks)
    settings = {"threads": args.threads, "window": WINDOW, "texts": {one: len(text) for one, text in texts.items()}}
    results = {"formats": figures, "refused": refused}
    write_report(args.output, build_report("format_quality", settings | {"questions": len(tasks)}, results))
    print("\n".join(table(figures)))


if __name__ == "__main__":
    main()
