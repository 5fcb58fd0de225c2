"""What whole models took on H200s, of runs on record: one figure of one shape a value.

Read from benchmarks/results/h200. Owns what was measured, in which file that is, and how a run's command becomes a
configuration. Does not own what is expected (`plan_against_measured`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any, Final

import quire

RESULTS: Final = pathlib.Path(__file__).with_name("results") / "h200"
SHAPES: Final = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
REPORTS: Final = ("w1", "w2", "w2_kv_fp8", "w3", "w5", "w4_06b", "w4_8b", "w6", "w6_tp2")
TOLD: Final = (
    "four_gpus", "four_bits", "deepseek_v2_lite", "dense_turns", "dense_pairs", "experts_again", "gpt_oss", "gemma",
)
BEFORE: Final = {("5d4425f8", "kv fp8"), ("5d4425f8", "shape:deepseek-v2-lite")}
"""(commit, keys and values or shape) of runs with kernels that are no more, which nothing here expects."""
ROUTED: Final = ("experts_again",)
"""Files with models of experts. First tokens as random weights route are left out: a prompt's tokens choose alike."""
LENGTHS: Final = (256, 120)
"""Of `benchmarks/deterministic_speed.py`: prompt and output."""
RANKS: Final = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-pcp": "prefill_context_parallel_size",
}  # fmt: skip
"""Flag → option."""
FILES: Final = {"w2x1.json": "W2", "w2x4.json": "W2 x 4"}
"""Lengths of W2, and the same four times."""
USED: Final = (
    "model", "quantization", "kv_cache_dtype", "hf_overrides", "max_model_len", "context_parallel_method",
    *RANKS.values(),
)  # fmt: skip
"""What of a configuration tells one run from another here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One that was measured."""

    config: tuple[tuple[str, Any], ...]
    """Some of `USED`."""
    what: str
    """'decode' or 'first' in ms, or a workload's name in output tokens a second."""
    measured: float
    batch: int = 1
    n_in: int = 1024
    n_out: int = 128
    file: str = ""
    """Of `RESULTS`, without its ending."""

    @property
    def options(self) -> dict[str, Any]:
        """The configuration, read."""
        return {name: json.loads(value) for name, value in self.config}


def read(name: str) -> dict[str, Any]:
    """A file of `RESULTS`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def figure(file: str, config: dict[str, Any], what: str, measured: float, **lengths: int) -> Figure:
    """With what of a configuration counts."""
    known = {name: config[name] for name in USED if config.get(name) not in (None, "", "auto", "none", {}, 1)}
    known["model"] = pathlib.Path(str(known.get("model", "llama-3.1-8b")).removeprefix("shape:")).name
    settings = tuple(sorted((name, json.dumps(value)) for name, value in known.items()))
    return Figure(settings, what, measured, **lengths, file=file)


def of_cases(file: str, config: dict[str, Any], cases: list[dict[str, Any]]) -> Iterator[Figure]:
    """Of `quire bench latency`."""
    for case in cases:
        lengths = {
            "batch": case["batch_size"],
            "n_in": case.get("input_len", 1024),
            "n_out": case.get("output_len", 128),
        }
        if case.get("decode_step_ms"):
            yield figure(file, config, "decode", case["decode_step_ms"], **lengths)
        yield figure(file, config, "first", case["mean_ttft_ms"], **lengths)


def of_reports() -> Iterator[Figure]:
    """Whole reports of `quire bench`."""
    for name in REPORTS:
        report = read(name)
        config, results = report["config"], report["results"]
        if "cases" in results:
            yield from of_cases(name, config, results["cases"])
        else:
            yield figure(name, config, config["workload"], results["output_tokens_per_second"])


def of_commands() -> Iterator[Figure]:
    """Runs of which their command and figures were kept."""
    turns = [("whole_models_turns", run) for run in read("whole_models_turns")["runs"]]
    before = [("experts_models", run) for run in read("experts_models")["runs"] if run["model"] == "qwen3-30b-a3b"]
    for file, run in turns + before:
        words = shlex.split(run["command"])
        given = dict(itertools.pairwise(words))
        config: dict[str, Any] = {
            name: given.get(f"--{name.replace('_', '-')}", "") for name in ("model", "quantization", "kv_cache_dtype")
        }
        if {(run["commit"], config["model"]), (run["commit"], f"kv {config['kv_cache_dtype']}")} & BEFORE:
            continue
        config |= {"max_model_len": 4096, "hf_overrides": json.loads(given.get("--hf-overrides", "{}"))}
        if "cases" in run:
            yield from of_cases(file, config, run["cases"])
        else:
            yield figure(file, config, given["--workload"], run["output_tokens_per_second"])


def of_words() -> Iterator[Figure]:
    """Commands of few words, whose workloads say the rest: several GPUs of one host, weights of 4 and 8 bits, a shape
    whose launches became fewer."""
    for file, run in [(name, run) for name in TOLD for run in read(name)["runs"] if "left_out" not in run]:
        words = shlex.split(run.get("as", run["command"]))  # what it was, where that is not what was asked for
        given = dict(itertools.pairwise(words))
        if "commit" not in run and "cases" in run["results"]:
            continue  # a launch more in each layer than in the run beside it
        workload = given.get("--workload", FILES.get(given.get("--dataset-path", ""), ""))
        config: dict[str, Any] = {name: int(given.get(flag, 1)) for flag, name in RANKS.items()}
        config["max_model_len"] = int(given.get("--max-model-len", 8704 if workload == "W4" else 4096))
        config |= {"model": given.get("--model", ""), "hf_overrides": json.loads(given.get("--hf-overrides", "{}"))}
        config["quantization"] = given.get("--quantization", "")
        if "cases" in run["results"]:
            found = of_cases(file, config, run["results"]["cases"])
            alike = file in ROUTED and not config["hf_overrides"]
            yield from (one for one in found if one.what != "first" or not alike)
        else:
            yield figure(file, config, workload, run["results"]["output_tokens_per_second"])


def of_windows() -> Iterator[Figure]:
    """Of two kinds of windows, with a plan of attention for each. `ms a token` of that file is no step: it lasts from
    a step's launch until its result is read, and the step before is on the device half of that time. So nothing is
    expected of it; `seconds` beside it would leave a prompt less than its products take at the device's peak."""
    (run,) = (row for row in read("kv_groups")["quire bench latency, 32 sequences, 8000 in, 128 out"] if row["groups"])
    yield figure("kv_groups", {"model": "gemma-3-1b"}, "decode", run["decode_step_ms"], batch=32, n_in=8000)


def of_notes() -> Iterator[Figure]:
    """Figures without a report."""
    for one in read("lab_notes")["figures"]:
        yield figure("lab_notes", one["config"], one["what"], one["measured"], batch=one["batch"])
    for run in read("deterministic")["runs"][:2]:
        model = next(word for word in shlex.split(run["command"]) if word.startswith("shape:"))
        for row in run["rows"]:
            if not row["asking"]:
                n_in, n_out = LENGTHS
                config = {"model": model, "max_model_len": 4096}
                lengths = {"batch": row["batch_size"], "n_in": n_in, "n_out": n_out}
                yield figure("deterministic", config, "decode", row["step_ms"], **lengths)


def of_context() -> Iterator[Figure]:
    """First tokens of long prompts, of one GPU and of ranks that share the prompt."""
    rows = read("context_parallel")["results"]["rows"]
    longest = max(row["tokens"] for row in rows) + 64
    for row in rows:
        config = {
            "model": "llama-3.1-8b", "max_model_len": longest, "hf_overrides": {"max_position_embeddings": longest},
            "prefill_context_parallel_size": row["ranks"],
            "context_parallel_method": row["method"] if row["method"] == "ring" else "auto",
        }  # fmt: skip
        yield figure("context_parallel", config, "first", 1e3 * row["seconds"], n_in=row["tokens"], n_out=1)


def figures() -> dict[Figure, list[Figure]]:
    """Each that is like no other (its own measurement left out) → all runs of it."""
    found: dict[Figure, list[Figure]] = {}
    for one in (*of_reports(), *of_commands(), *of_words(), *of_windows(), *of_context(), *of_notes()):
        found.setdefault(dataclasses.replace(one, measured=0.0, file=""), []).append(one)
    return found
