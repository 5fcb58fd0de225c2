"""The command line that serves a plan. Only flags that the engine has; what has none is said.

Owns the words. Invariant: every flag in a command is an option of `EngineConfig`.
"""

from __future__ import annotations

import shlex
import typing

from quire.config.engine import EngineConfig
from quire.planner.formats import Formats
from quire.planner.mesh import Mesh

DEGREES = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "expert_parallel_size",
    "sp": "sequence_parallel_size",
}  # fmt: skip
"""Kind of parallelism → the option that says its degree."""


def serve_command(
    model: str, mesh: Mesh, formats: Formats, *, device: str, max_num_seqs: int, max_model_len: int, quantization: str
) -> tuple[str, list[str]]:
    """(the command, what it cannot say). quantization: the weights' format as it was asked for."""
    words, unsaid = ["quire", "serve", model], []
    for degree, option in DEGREES.items():
        value = getattr(mesh, degree)
        if value == 1:
            continue
        if option in EngineConfig.__struct_fields__:
            words += [f"--{option.replace('_', '-')}", str(value)]
        else:
            unsaid.append(f"{degree} = {value}: this version of the engine has no --{option.replace('_', '-')}")
    if mesh.dp > 1:
        unsaid.append(f"dp = {mesh.dp}: start the command {mesh.dp} times, each with its own devices and port")
    if quantization not in ("auto", "bfloat16", "float16", "float32"):
        if quantization in choices("quantization"):
            words += ["--quantization", quantization]
            if device != "cpu":
                unsaid.append(f"--quantization {quantization} rounds weights on a CPU only")
        else:
            unsaid.append(f"weights in {quantization}: the engine has no such --quantization; a checkpoint may hold it")
    if formats.kv not in ("bfloat16", "float16", "float32"):
        if formats.kv in choices("kv_cache_dtype"):
            words += ["--kv-cache-dtype", formats.kv]
        else:
            unsaid.append(f"keys and values in {formats.kv}: the engine has no such --kv-cache-dtype")
    words += ["--max-num-seqs", str(max_num_seqs), "--max-model-len", str(max_model_len)]
    return shlex.join(words), unsaid


def choices(option: str) -> set[str]:
    """Values that an option of the engine takes."""
    hint = typing.get_type_hints(EngineConfig).get(option)
    return set(typing.get_args(hint))
