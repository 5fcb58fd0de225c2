"""Twenty mistakes and what Quire says to them, each from a run of the command line: writes docs/mistakes.md.

    python -m benchmarks.mistakes

Needs no network and no GPU. A run takes a few seconds, all of them some minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable

from quire.bench.shape import FOLDER
from quire.compute.weights.hub import find_checkpoint

DOCUMENT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "mistakes.md"
LIMIT_S = 300
WIDTH = 110
"""Longer lines are wrapped in the document, as a terminal would."""
LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (INFO|WARNING|ERROR) |^quire: starting ")
Prepare = Callable[[pathlib.Path], object]


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What somebody did."""

    title: str
    words: tuple[str, ...]
    """After `quire`; paths are relative to a folder that `prepare` fills."""
    prepare: Prepare = lambda folder: None
    variables: tuple[tuple[str, str], ...] = ()
    typed: str = ""
    """Standard input."""


def config(name: str, **changes: object) -> Prepare:
    """A folder with the config.json of Llama 3.1 8B, changed."""

    def prepare(folder: pathlib.Path) -> None:
        values = json.loads((FOLDER / "llama-3.1-8b/config.json").read_text()) | changes
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))

    return prepare


def files(**contents: str) -> Prepare:
    """Files by path, with __ for / and _DOT_ for a dot."""

    def prepare(folder: pathlib.Path) -> None:
        for name, content in contents.items():
            path = folder / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return prepare


def demo_with(**contents: str | None) -> Prepare:
    """A copy of the bundled model as `model`, with files replaced, or removed where the content is None."""

    def prepare(folder: pathlib.Path) -> None:
        shutil.copytree(find_checkpoint(""), folder / "model")
        for name, content in contents.items():
            path = folder / "model" / name.replace("_DOT_", ".")
            if content is None:
                path.unlink()
            else:
                path.write_text(content)

    return prepare


def untemplated(folder: pathlib.Path) -> None:
    """The bundled model without its chat template."""
    demo_with()(folder)
    path = folder / "model" / "tokenizer_config.json"
    values = json.loads(path.read_text())
    del values["chat_template"]
    path.write_text(json.dumps(values))


def pickled(folder: pathlib.Path) -> None:
    """A checkpoint with pytorch_model.bin only."""
    demo_with(model_DOT_safetensors=None, pytorch_model_DOT_bin="")(folder)


def cut(folder: pathlib.Path) -> None:
    """A checkpoint whose download stopped."""
    demo_with()(folder)
    weights = folder / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def gemma_gguf(folder: pathlib.Path) -> None:
    """The smallest GGUF file of another architecture."""
    text = [struct.pack("<Q", len(word)) + word for word in (b"general.architecture", b"gemma3n")]
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text[0] + struct.pack("<I", 8) + text[1]
    (folder / "gemma-3n-E4B-it-Q4_K_M.gguf").write_bytes(header.ljust(96, b"\0"))


def without_kernels(folder: pathlib.Path) -> None:
    """The package as an installation without its compiled kernels has it; it goes before the checkout."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(DOCUMENT.parents[1] / "quire", folder / "quire", ignore=ignored)


ONE = ("--prompt", "Hello", "--max-tokens", "1")
DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu", "--port", "0")
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 800, "num_attention_heads": 64}
MISTAKES = (
    Mistake("A model larger than the machine", ("serve", "llama-700b", *DUMMY), config("llama-700b", **LARGE)),
    Mistake(
        "A context longer than memory holds",
        ("serve", "llama-8b", *DUMMY, "--max-model-len", "131072", "--quantization", "int4", "--dtype", "float32"),
        config("llama-8b"),
    ),
    Mistake(
        "A pool larger than memory", ("serve", "--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", "4000GiB")
    ),
    Mistake(
        "An architecture that Quire has not",
        ("generate", "jamba", *ONE),
        config("jamba", architectures=["JambaForCausalLM"], model_type="jamba"),
    ),
    Mistake(
        "A GPTQ checkpoint in 3 bits",
        ("generate", "llama-gptq", *ONE),
        config("llama-gptq", quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 128}),
    ),
    Mistake(
        "An HQQ checkpoint",
        ("generate", "llama-hqq", *ONE),
        config("llama-hqq", quantization_config={"quant_method": "hqq"}),
    ),
    Mistake(
        "Code that comes with a checkpoint",
        ("generate", "custom", *ONE),
        config(
            "custom", architectures=["CustomForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_custom.Custom"}
        ),
    ),
    Mistake(
        "An adapter given as a model",
        ("generate", "my-lora", *ONE),
        files(
            **{"my-lora__adapter_config_DOT_json": '{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}'},
            **{"my-lora__adapter_model_DOT_safetensors": ""},
        ),
    ),
    Mistake("A folder without config.json", ("generate", "models", *ONE), files(models__llama__config_DOT_json="{}")),
    Mistake("A checkpoint of pickled weights", ("generate", "model", *ONE), pickled),
    Mistake("A file of pickled weights", ("generate", "model.pt", *ONE), files(model_DOT_pt="")),
    Mistake("A download that stopped", ("generate", "model", *ONE), cut),
    Mistake(
        "A GGUF file of an architecture that Quire has not",
        ("generate", "gemma-3n-E4B-it-Q4_K_M.gguf", *ONE),
        gemma_gguf,
    ),
    Mistake("A folder of GGUF files", ("generate", "models", *ONE), files(models__llama_DOT_gguf="")),
    Mistake(
        "A hub name without a network",
        ("generate", "meta-llama/Llama-3.1-8B", *ONE),
        variables=(("HF_HUB_OFFLINE", "1"), ("HF_HOME", "cache")),
    ),
    Mistake("A path that does not exist", ("generate", "./modles/llama", *ONE)),
    Mistake(
        "A chat with a model that has no template",
        ("chat", "model", "--device", "cpu"),
        untemplated,
        typed="Hello\n",
    ),
    Mistake("A chat template that is not there", ("serve", "--port", "0", "--chat-template", "chatml.jinja")),
    Mistake("A quantization that the device has not", ("generate", "--device", "null", "--quantization", "int4", *ONE)),
    Mistake("Compiled kernels that were never built", ("doctor",), without_kernels),
)


def run(mistake: Mistake) -> tuple[str, int]:
    """(what was printed, exit code) of the mistake, made in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        mistake.prepare(pathlib.Path(name))
        environment = dict(os.environ) | dict(mistake.variables)
        environment["PYTHONPATH"] = str(DOCUMENT.parents[1])
        done = subprocess.run(
            [sys.executable, "-m", "quire", *mistake.words], cwd=name, env=environment, timeout=LIMIT_S,
            capture_output=True, text=True, check=False, input=mistake.typed,
        )  # fmt: skip
        lines = [line for line in done.stderr.splitlines() if not LOG_LINE.match(line)]
        if not lines:
            lines = [line for line in done.stdout.splitlines() if "cpu kernels" in line]
        text = "\n".join(lines).replace(name + "/", "").replace(str(DOCUMENT.parents[1]), "…")
        return text, done.returncode


def document(results: list[tuple[str, int]]) -> str:
    """The document."""
    parts = [
        "# Twenty mistakes",
        "Each is from a run, long lines wrapped; `python -m benchmarks.mistakes` makes this document again.\n"
        "Figures of memory are those of the machine on which it ran.\n"
        "Exit code 2 means options or checkpoint, 1 the rest.",
    ]
    for number, (mistake, (text, code)) in enumerate(zip(MISTAKES, results, strict=True), 1):
        settings = "".join(f"{name}={value} " for name, value in mistake.variables)
        parts.append(f"## {number}. {mistake.title}")
        shown = "\n".join(textwrap.fill(line, WIDTH) if len(line) > WIDTH else line for line in text.splitlines())
        parts.append(f"```\n$ {settings}quire {' '.join(mistake.words)}\n{shown}\n```\n\nExit code {code}.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Make every mistake and write the document."""
    results = []
    for mistake in MISTAKES:
        results.append(run(mistake))
        print(f"{results[-1][1]}  {mistake.title}\n{results[-1][0]}\n", flush=True)
    DOCUMENT.write_text(document(results))


if __name__ == "__main__":
    main()
