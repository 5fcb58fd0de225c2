"""`quire plan MODEL`: parameters, FLOPs, memory, time and cost of a model from its description alone.

Owns the flags and where a model is found. Does not own any figure (`planner`). `quire plan train` is `plan_train`.
Imports no torch, unless `--gpu here` measures this machine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.bench import plan_check
from quire.bench.shape import FOLDER, PREFIX, shape_names, shape_options
from quire.cli import plan_train
from quire.cli.interrupt import instant_exit
from quire.compute.weights.hub import is_on_hub
from quire.compute.weights.hub_headers import network_errors, read_hub_files
from quire.config.arch import ModelArch
from quire.config.command_line import dashed
from quire.config.engine import EngineConfig
from quire.config.eplb import read_eplb
from quire.config.flags import FlagParser
from quire.config.gguf import is_gguf, read_header
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.config.resolve import DEFAULT_BATCHED_TOKENS, DEFAULT_SEQS
from quire.config.shapes import BUNDLED, MODELS
from quire.core.errors import ConfigError, LoadError, shown
from quire.core.spelling import did_you_mean
from quire.planner import chart, report, tables
from quire.planner.accelerators import (
    REFERENCE,
    Accelerator,
    accelerator_named,
    calibration_for,
    check_calibrated,
    host_accelerator,
)
from quire.planner.calibration import Calibration, load_calibration
from quire.planner.coded import formats_of
from quire.planner.expert_loads import ExpertLoads, read_loads
from quire.planner.formats import FORMATS, formats_named
from quire.planner.mesh import n_experts_of
from quire.planner.placement import Limits
from quire.planner.search import MOST_DEVICES, Task
from quire.planner.workload import Workload, check_price, parse_objective, workload_named

HERE, CPU = "here", "cpu"
DEMO = "demo"
"""The model where none is named, as in `quire serve`."""
INSTEAD = "; `here` measures this machine, `cpu` its CPU; a file of `quire bench calibrate` is given with --calibration"
"""Of the name of an accelerator."""
ABOUT_DEVICES = (
    "price", "count", "mesh", "slo", "workload", "calibration", "max_num_seqs", "max_model_len", "expert_loads",
    "enable_eplb", "eplb_config",
)  # fmt: skip
"""Flags that change nothing without --gpu."""
MESH = "--mesh {}=N with --count N"
ELSEWHERE = {
    "--quantization": "--weights, such as fp8, int8 or int4-g128", "-q": "--weights, such as fp8, int8 or int4-g128",
    "--tensor-parallel-size": MESH.format("tp"), "-tp": MESH.format("tp"),
    "--pipeline-parallel-size": MESH.format("pp"), "-pp": MESH.format("pp"),
    "--data-parallel-size": MESH.format("dp"), "-dp": MESH.format("dp"),
    "--model": "MODEL, the first word behind plan", "--shape": "shape:NAME, the first word behind plan",
    "--dtype": "--weights, such as float16", "--gpus": "--count",
}  # fmt: skip
"""Flags of `quire serve` and of `quire plan train` → what says the same."""
NAMED = {
    "gpu": "an accelerator, such as h200", "mesh": "degrees, such as tp=4,pp=2",
    "workload": "chat, rag, offline or a file", "slo": "limits, such as ttft=200ms,tpot=20ms",
    "expert_loads": "even, zipf:1.0 or a file", "eplb_config": "a JSON object", "calibration": "a file",
    "plot": "a file", "check": "a file",
}  # fmt: skip
"""Flags whose text is never empty → what it is."""
KEPT_BLOCKS = {
    "cpu": {"Q8_0": "int8-g32", "Q4_0": "int4-g32", "MXFP4": "int4-g32"},
    "cuda": {"Q4_0": "int4-g32", "MXFP4": "mxfp4"},
}  # fmt: skip
"""Types of a GGUF file's blocks that stay as they are on such a device → the format that is as large."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags of `quire plan`."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help="folder with config.json, .gguf file, hub name, or shape:NAME",
    )
    add("--gpu", default=None, help="accelerator, such as h200; here: measure this machine; cpu: its CPU")
    add("--count", type=int, default=None, help="how many of them (default: 1)")
    add("--mesh", default=None, help="only this one, such as tp=4,pp=2; otherwise all of --count are compared")
    add("--weights", default="auto", help="format of weights, such as fp8, int8, int4-g128 (default: the model's type)")
    add("--kv-cache-dtype", default="auto", help="of keys and values: bfloat16, fp8, int8 (default: the model's type)")
    add("--expert-loads", default=None, help="how often experts are chosen: even, zipf:1.0, or a JSON file of loads")
    add("--enable-eplb", action="store_true", help="experts move between ranks by their load, as in quire serve")
    add(
        "--eplb-config",
        default=None,
        help="as in quire serve: a JSON object with num_redundant_experts, copies of experts",
    )
    add("--workload", default=None, help="chat, rag, offline, or a JSON file of lengths (default: chat)")
    add("--slo", default=None, help="limits that choose the concurrency, such as ttft=200ms,tpot=20ms; none sets none")
    add("--price", type=float, default=None, help="dollars an hour of one GPU")
    add("--max-model-len", type=int, default=None, help="longest sequence (default: the model's)")
    add(
        "--max-num-seqs",
        type=int,
        default=None,
        help="most sequences at once of a replica (default: 1024, fewer where states leave too little)",
    )
    add("--calibration", default=None, help="file of `quire bench calibrate`, in place of what comes with Quire")
    add("--json", action="store_true", help="print JSON")
    add("--plot", default=None, metavar="FILE.png", help="draw roofline, memory and frontier (needs matplotlib)")
    add("--check", default=None, metavar="RESULT.json", help="compare with a recorded result of quire bench (of MODEL)")
    add("--dataset-path", default="", help="with --check of W3: the lengths that it had")
    parser.epilog = "quire plan train plans training, and what a budget is best spent on; see its --help"
    if isinstance(parser, FlagParser):
        parser.elsewhere = ELSEWHERE
        plan_train.add_arguments(parser.add_mode(plan_train.NAME, plan_train.MEANING))


def run(namespace: argparse.Namespace) -> int:
    """`quire plan`; exit code 1 if the model does not fit, misses its limits or cannot be served, or if what --check
    compares is beyond the error bar: the answer is no."""
    for flag, such in NAMED.items():
        if getattr(namespace, flag) == "":
            raise ConfigError(f"{dashed(flag)} names nothing: give {such}, or leave it out")
    if namespace.check:
        return _check(namespace)
    if namespace.dataset_path:
        raise ConfigError("--dataset-path has the lengths of what --check compares: give that too, or leave it out")
    if namespace.plot:
        if not namespace.gpu:
            raise ConfigError("--plot draws a model on hardware: give --gpu")
        chart.check_chart_path(namespace.plot)
    _check_counts(namespace)
    count = namespace.count or 1
    price = 0.0 if namespace.price is None else check_price(namespace.price)
    task, mesh = _task(namespace), _mesh(namespace.mesh, count)
    files = _gguf_file(namespace.model) or _hub_files(namespace.model)
    if namespace.gpu:
        found = report.plan(task, namespace.model or DEMO, count, mesh, price)
    else:
        found = {"model": namespace.model or DEMO, "facts": report.model_facts(task)}
    if files is not None:
        found["facts"]["checkpoint"] = files
        found.get("unknown", []).extend(_kept_blocks(files, task))
    print(json.dumps(found, indent=1) if namespace.json else "\n".join(tables.lines(found)))
    if namespace.plot:
        if "memory" not in found:
            raise ConfigError(f"--plot: no mesh of {count} devices can divide the model: nothing to draw")
        chart.write_chart(namespace.plot, found)
    objection = tables.objection(found)
    if objection:
        print(f"quire plan: {objection}", file=sys.stderr)
    return 1 if objection else 0


def _check(namespace: argparse.Namespace) -> int:
    for flag in (*ABOUT_DEVICES, "plot", "weights", "kv_cache_dtype"):
        if flag != "calibration" and getattr(namespace, flag) not in (None, False, "auto"):
            raise ConfigError(f"{dashed(flag)} changes nothing beside --check, which takes what was run: leave it out")
    result = plan_check.read_result(namespace.check)
    arch = find_arch(namespace.model) if namespace.model else None
    if arch is not None:
        plan_check.check_model(result, arch, namespace.model)
    device, given = _device(namespace) if namespace.gpu or namespace.calibration else (None, None)
    cost = plan_check.cost_of_result(result, device, given, arch)
    found = plan_check.compare(result, cost, namespace.dataset_path)
    if namespace.json:
        print(json.dumps([dataclasses.asdict(one) | {"error": one.error} for one in found], indent=1))
    else:
        print("\n".join(plan_check.lines(found, cost)))
    return 1 if plan_check.is_beyond(found, cost) else 0


def find_arch(model: str) -> ModelArch:
    """What `model` is described as, without reading a weight."""
    if model.startswith(PREFIX):
        shape_options(model)
        return read_arch(FOLDER / model.removeprefix(PREFIX))
    if model in BUNDLED:
        return read_arch(MODELS / BUNDLED[model])
    path = pathlib.Path(model).expanduser()
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return read_arch(path)
    if path.is_file():
        raise ConfigError(f"{shown(model)} is a file, but no GGUF: name the folder of config.json")
    if path.is_absolute() or model.startswith((".", "~")) or model.endswith("/"):
        raise ConfigError(f"{shown(model)}: there is no such folder or file")
    return read_arch(_from_hub(model))


def _gguf_file(model: str) -> dict[str, Any] | None:
    """What a GGUF file has numbers of, as `_hub_files`; None: the model is none."""
    path = pathlib.Path(model).expanduser()
    if model.startswith(PREFIX) or not (path.is_file() and is_gguf(path)):
        return None
    numbers: dict[str, int] = collections.Counter()
    tensors = read_header(path).tensors.values()
    for one in tensors:
        numbers[one.dtype] += math.prod(one.shape)
    return {
        "n_files": 1, "n_bytes": sum(one.n_bytes for one in tensors), "numbers": dict(numbers),
        "is_rounded": not numbers.keys() <= {"F32", "F16", "BF16"},
    }  # fmt: skip


def _kept_blocks(files: dict[str, Any], task: Task) -> Iterator[str]:
    """What is planned decoded of a GGUF file, and stays as it is on the device (docs/gguf.md)."""
    for dtype, weights in KEPT_BLOCKS["cpu" if task.device.is_host else "cuda"].items():
        if task.weights == "auto" and dtype in files.get("numbers", {}):
            what = "experts" if FORMATS[weights].of_experts else "all"
            is_asked = what == "all" or any(map(n_experts_of, task.arch.layers))
            instead = f": --weights {weights} plans {what} as kept" if is_asked else ""
            yield f"matrices in {dtype} stay so, and are planned in {task.formats.weights.name}{instead}"


def _hub_files(model: str) -> dict[str, Any] | None:
    """What the headers of a hub's files say, or why they say nothing: the plan stands on its description anyway. None:
    it is not on the hub."""
    if model.startswith(PREFIX) or not is_on_hub(model):
        return None
    try:
        files = read_hub_files(model)
    except LoadError as error:
        return {"unknown": error.message}
    return {**msgspec.structs.asdict(files), "is_rounded": files.is_rounded}


def _from_hub(model: str) -> pathlib.Path:
    """The folder of the hub's cache that has its config.json, fetched where it is not there."""
    if model.count("/") != 1 or importlib.util.find_spec("huggingface_hub") is None:
        near = did_you_mean(PREFIX + model, [PREFIX + name for name in shape_names()])
        raise ConfigError(
            f"{shown(model)} is neither a folder, a .gguf file, {PREFIX}NAME nor a hub name such as org/name{near}"
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    is_there = True
    try:
        try:
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(model, "config.json"))
        except (HfHubHTTPError, HFValidationError):
            raise
        except network_errors():  # a download would wait half a minute for the network
            is_there = False
        path = huggingface_hub.hf_hub_download(model, "config.json", local_files_only=not is_there)
        return pathlib.Path(path).parent
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"the config.json of {shown(model)} cannot be had: the hub cannot be reached (or HF_HUB_OFFLINE is set),"
            " and it is not in the hub's cache. Name a folder that has it, or run this where there is a network"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"the config.json of {shown(model)} cannot be had from the hub: {shown(reason)}") from None


def _task(namespace: argparse.Namespace) -> Task:
    workload = workload_named(namespace.workload or "chat")
    objective = parse_objective(namespace.slo or workload.slo)
    formats_named(namespace.weights, namespace.kv_cache_dtype)  # whatever is wrong is said before a model is fetched
    device, calibration = _device(namespace)
    arch = find_arch(namespace.model)
    max_model_len = namespace.max_model_len or 0
    _check_lengths(arch, max_model_len, workload if namespace.gpu else None)
    limits = Limits(max_model_len=max_model_len)
    if device.is_host:
        limits = Limits(
            max_model_len=max_model_len, max_num_seqs=DEFAULT_SEQS["cpu"], captures=False, in_main_memory=True,
            max_num_batched_tokens=DEFAULT_BATCHED_TOKENS["cpu"],
        )  # fmt: skip
    if namespace.max_num_seqs:
        limits = msgspec.structs.replace(limits, max_num_seqs=namespace.max_num_seqs, are_seqs_given=True)
    formats = formats_of(arch, namespace.weights, namespace.kv_cache_dtype, device)
    if formats.coded is None and formats.weights.of_experts and not any(map(n_experts_of, arch.layers)):
        raise ConfigError(
            f"--weights {formats.weights.name} is of experts alone, and {arch.family} has none: give another format"
        )
    return Task(
        arch=arch, device=device, calibration=calibration, limits=limits, workload=workload, objective=objective,
        formats=formats, loads=_loads(namespace, arch), weights=namespace.weights,
    )  # fmt: skip


def _loads(namespace: argparse.Namespace, arch: ModelArch) -> ExpertLoads:
    """Of experts, and their copies."""
    n_redundant = None
    if namespace.enable_eplb or namespace.eplb_config:
        options: object = None
        with contextlib.suppress(ValueError, RecursionError):
            options = json.loads(namespace.eplb_config or "{}")
        if not isinstance(options, dict):
            raise ConfigError(f"--eplb-config {shown(namespace.eplb_config)} is no JSON object")
        eplb = read_eplb(EngineConfig(enable_eplb=namespace.enable_eplb, eplb_config=options))
        if eplb is None:
            raise ConfigError(
                f"--eplb-config {shown(namespace.eplb_config)}: nothing is balanced: add --enable-eplb, or leave it out"
            )
        n_redundant = eplb.num_redundant_experts
        if namespace.count in (None, 1):
            raise ConfigError(
                "--enable-eplb moves experts between ranks, and one device has all of them: raise --count"
            )
    loads = read_loads(namespace.expert_loads or "", n_redundant)
    loads.check(arch.family, map(n_experts_of, arch.layers))
    return loads


def _check_lengths(arch: ModelArch, max_model_len: int, workload: Workload | None) -> None:
    """Against the model's context."""
    most = arch.max_position_scaled
    if max_model_len > most:
        raise ConfigError(f"--max-model-len {max_model_len:,} exceeds the {most:,} positions of the model: lower it")
    limit = max_model_len or arch.max_position
    if workload is None or workload.longest <= limit:
        return
    raised = f"add --max-model-len {workload.longest}, or " if workload.longest <= most else ""
    raise ConfigError(
        f"--workload {workload.name} has a sequence of {workload.longest:,} tokens, prompt and output, and the longest"
        f" is {limit:,}: {raised}give a JSON file of shorter ones"
    )


def _check_counts(namespace: argparse.Namespace) -> None:
    for flag in ABOUT_DEVICES:
        if getattr(namespace, flag) not in (None, False) and not namespace.gpu:
            raise ConfigError(f"{dashed(flag)} is about devices: say which with --gpu")
    for flag, least, most in (("count", 1, MOST_DEVICES), ("max_model_len", 0, 1 << 30), ("max_num_seqs", 0, 65536)):
        value = getattr(namespace, flag)
        if value is None:
            continue
        if not least <= value <= most:
            raise ConfigError(f"{dashed(flag)} {value}: {least} to {most:,} are possible")


def _device(namespace: argparse.Namespace) -> tuple[Accelerator, Calibration]:
    given = load_calibration(pathlib.Path(namespace.calibration)) if namespace.calibration else None
    if namespace.gpu not in (HERE, CPU):
        device = accelerator_named(namespace.gpu or REFERENCE, INSTEAD)
        if given is not None and namespace.gpu:
            check_calibrated(given, device)
        return device, given or calibration_for(device)
    if given is not None and given.device == "cpu":
        return host_accelerator(given), given
    if given is not None and namespace.gpu == CPU:
        raise ConfigError(f"--calibration was measured on the {given.device}, and --gpu is cpu: leave one of them out")
    with instant_exit():
        from quire.bench.here import this_machine  # the only place that needs torch

        device, found = this_machine(namespace.gpu == CPU)
    return device, given or found


def _mesh(text: str | None, count: int) -> Mesh | None:
    """`tp=4,pp=2`; what is missing makes up for the count as replicas."""
    if not text:
        return None
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        is_degree = value.isdecimal() and len(value) <= len(str(MOST_DEVICES)) and 1 <= int(value) <= MOST_DEVICES
        if name not in Mesh.__struct_fields__ or not is_degree:
            known = ", ".join(Mesh.__struct_fields__)
            raise ConfigError(
                f"--mesh {shown(part)} cannot be read: write tp=4,pp=2, of {known}, each from 1 to {MOST_DEVICES:,}"
            )
        if name in degrees:
            raise ConfigError(f"--mesh {shown(text)} says {name} twice")
        degrees[name] = int(value)
    mesh = Mesh(**degrees)
    if "dp" not in degrees and count % mesh.n_ranks == 0:
        mesh = Mesh(**degrees, dp=count // mesh.n_ranks)
    if mesh.n_ranks != count:
        raise ConfigError(
            f"--mesh {shown(text)} has {mesh.n_ranks} devices, and --count is {count}: give a mesh of {count}, or"
            f" --count {mesh.n_ranks}; without --mesh every mesh is compared"
        )
    return mesh
