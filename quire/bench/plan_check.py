"""Where the planner's model of time errs: what it expects beside what a recorded run took, whole and by part.

Owns the reading of reports of `quire bench`. Does not own the model (`planner`) nor the reports (`report`). No torch.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from quire.bench.workloads import THROUGHPUT_WORKLOADS, throughput_dataset
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import mesh_of
from quire.config.model import read_arch
from quire.config.shapes import BUNDLED, FOLDER, MODELS, PREFIX, shape_names
from quire.config.stages import refuse_uneven
from quire.core.errors import ConfigError, shown
from quire.core.plan import Spans
from quire.planner.accelerators import Accelerator, accelerator_seen, calibration_for
from quire.planner.calibration import Calibration
from quire.planner.coded import formats_of
from quire.planner.cost import CostModel, calibrated
from quire.planner.error_bar import error_bar
from quire.planner.operators import decode_spans, prefill_spans
from quire.planner.serving import closed_batch_s

DEFAULT_SEQS, DEFAULT_TOKENS = 1024, 8192
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Figure = Annotated[float, msgspec.Meta(gt=0)]
PREFIX_LEN: Final = {"W5": 2048}
"""Tokens that all prompts of a workload have at their front."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One figure."""

    what: str
    unit: str
    expected: float
    measured: float

    @property
    def error(self) -> float:
        """Relative: 0.05 is 5 % too much."""
        return self.expected / self.measured - 1

    @property
    def factor(self) -> float:
        """Between the two, either way: 1.05 is 5 % too much, or as much too little."""
        return max(self.expected / self.measured, self.measured / self.expected)

    def line(self) -> str:
        """For people."""
        return (
            f"{self.what:<44}{_number(self.expected):>12}{_number(self.measured):>12} {self.unit:<6}"
            f"{100 * self.error:+6.1f} %"
        )


class _Gpu(msgspec.Struct):
    name: str = ""


class _Hardware(msgspec.Struct):
    gpus: list[_Gpu] | None = None


class _Config(msgspec.Struct):
    model: str = ""
    hf_overrides: dict[str, Any] | None = None
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    workload: str = "none"
    dataset_path: str = ""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


class _Report(msgspec.Struct):
    """What is read of a report."""

    config: _Config
    hardware: _Hardware = msgspec.field(default_factory=_Hardware)


class _Case(msgspec.Struct):
    batch_size: _Count
    input_len: _Count
    output_len: _Count
    median_ttft_ms: _Figure
    decode_step_ms: float | None = None


class _Cases(msgspec.Struct):
    cases: Annotated[list[_Case], msgspec.Meta(min_length=1)]


class _Latency(_Report, kw_only=True):
    results: _Cases


class _Rate(msgspec.Struct):
    output_tokens_per_second: _Figure


class _Throughput(_Report, kw_only=True):
    results: _Rate


_READ: Final[dict[str, type[_Report]]] = {"latency": _Latency, "throughput": _Throughput}


def read_result(path: str) -> dict[str, Any]:
    """A report of `quire bench`. ConfigError for anything else."""
    try:
        found = json.loads(pathlib.Path(path).expanduser().read_bytes())
    except OSError as error:
        name = path.removeprefix(PREFIX)
        if name in shape_names():
            raise ConfigError(
                f"--check {shown(path)} is a model, and --check takes a report of quire bench: name the model before"
                f" it, as quire plan {PREFIX}{name} --check RESULT.json"
            ) from None
        raise ConfigError(f"--check {shown(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"--check {shown(path)} is no JSON") from None
    if not isinstance(found, dict) or not {"benchmark", "config", "results"} <= found.keys():
        raise ConfigError(f"--check {shown(path)} is no report of quire bench: --output-json writes them")
    name = str(found["benchmark"]).partition(" ")[0]
    if name in ("serve", "replay"):
        raise ConfigError(
            f"--check {shown(path)} is of `quire bench {name}`, which has asked the server what its model of time"
            " expected: see results.expected there; reports of latency and throughput can be checked"
        )
    try:
        msgspec.convert(found, type=_READ.get(name, _Report))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--check {shown(path)} is damaged, or of another version of quire bench: {error}") from None
    return found


def device_of_result(result: Mapping[str, Any]) -> Accelerator:
    """The accelerator of the table on which it ran. ConfigError for one that is not there, and for a CPU."""
    gpus = result.get("hardware", {}).get("gpus") or [{}]
    name = str(gpus[0].get("name", ""))
    found = accelerator_seen(name)
    if found is not None:
        return found
    where = shown(name) if name else "a CPU"
    raise ConfigError(f"the result was recorded on {where}: give the file of `quire bench calibrate` by --calibration")


def cost_of_result(
    result: Mapping[str, Any],
    device: Accelerator | None = None,
    calibration: Calibration | None = None,
    arch: ModelArch | None = None,
) -> CostModel:
    """With the formats and the ranks of the run. arch: of its model, where it is known."""
    config, device = result["config"], device or device_of_result(result)
    arch = arch or arch_of_result(config.get("model", ""), config.get("hf_overrides"))
    quantization = config.get("quantization", "none")
    weights = arch.dtype if quantization == "none" else quantization
    formats = formats_of(arch, weights, config.get("kv_cache_dtype", "auto"), device)
    partition, n_stages = config.get("pp_layer_partition", ""), config.get("pipeline_parallel_size", 1)
    refuse_uneven(arch, n_stages, partition, "the plan's stages take as long as one another")
    ranks = {name: config[name] for name in EngineConfig.__struct_fields__ if "parallel" in name and name in config}
    return calibrated(
        arch, device, formats=formats, mesh=mesh_of(EngineConfig(**ranks)),
        calibration=calibration or calibration_for(device),
    )  # fmt: skip


def arch_of_result(model: str, overrides: Mapping[str, Any] | None = None) -> ModelArch:
    """ConfigError for a model that `_folder_of` does not find."""
    folder = _folder_of(model)
    if folder is None:
        raise ConfigError(
            f"the result is of the model {shown(model)}, which is not a folder here: name MODEL,"
            f" as in quire plan {PREFIX}NAME --check RESULT.json"
        )
    return read_arch(folder, overrides)


def _folder_of(model: str) -> pathlib.Path | None:
    """Of the demo, of shape:NAME, of a bundled shape's folder as it was on that machine, or of a folder that is here.
    None: it is none of them."""
    if model in BUNDLED:
        return MODELS / BUNDLED[model]
    folder = pathlib.Path(model)
    if model.startswith(PREFIX) or folder.parts[-3:-1] == FOLDER.parts[-2:]:
        folder = FOLDER / pathlib.Path(model.removeprefix(PREFIX)).name
    return folder if (folder / "config.json").is_file() else None


def check_model(result: Mapping[str, Any], arch: ModelArch, name: str) -> None:
    """ConfigError if the run was of a bundled shape, or of a folder that is here, and `arch`, which `name` has, is of
    another model."""
    config = result["config"]
    model = str(config.get("model", ""))
    folder = _folder_of(model)
    if folder is None:
        return
    ran = read_arch(folder, config.get("hf_overrides"))
    if ran.n_parameters != arch.n_parameters:
        raise ConfigError(
            f"the result is of the model {shown(model)} with {ran.n_parameters:,} parameters, and {shown(name)} has"
            f" {arch.n_parameters:,}: leave MODEL out"
        )


def compare(result: Mapping[str, Any], cost: CostModel, dataset_path: str = "") -> list[Comparison]:
    """Every figure of a report that the model has an expectation of."""
    name = str(result["benchmark"]).partition(" ")[0]
    if name == "latency":
        found = [one for case in result["results"]["cases"] for one in compare_case(case, cost)]
        if all(":   " in one.what for one in found):
            raise ConfigError(
                "the result has several requests at once and no decode step: give one of --batch-size 1, or of more"
                " --output-len"
            )
        return found
    if name == "throughput":
        return [compare_throughput(result, cost, dataset_path)]
    raise ConfigError(f"results of `quire bench {name}` have no step that could be compared: latency and throughput do")


def compare_case(case: Mapping[str, Any], cost: CostModel) -> Iterator[Comparison]:
    """One batch of equal requests: its first tokens, where they come from one step, and its decode steps."""
    batch, n_in, n_out = case["batch_size"], case["input_len"], case["output_len"]
    title, n_ranks = f"{batch} x {n_in} in, {n_out} out", cost.timer.mesh.dp
    of_ranks = [(batch + n_ranks - 1 - rank) // n_ranks for rank in range(min(batch, n_ranks))]
    if batch == 1:
        first_s = _step_s([prefill_spans(n_in)], cost) + cost.first_token_s
        yield Comparison(f"{title}: first token", "ms", 1e3 * first_s, case["median_ttft_ms"])
    if case.get("decode_step_ms"):
        step_s = _step_s([decode_spans(n, n_in + n_out // 2) for n in of_ranks], cost)
        yield Comparison(f"{title}: decode step", "ms", 1e3 * step_s, case["decode_step_ms"])
    found = case.get("breakdown") or {}  # of a report, or a `Breakdown` of this run
    device = found.get("device_ms") if isinstance(found, Mapping) else found.device_ms
    if device:
        spans = decode_spans(of_ranks[0], n_in + n_out // 2) if n_out > 1 else prefill_spans(n_in)
        for part, seconds in cost.timer.parts_s(spans).items():
            if device.get(part):
                yield Comparison(f"{title}:   {part}", "ms", 1e3 * seconds, device[part])


def _step_s(of_ranks: Sequence[Spans], cost: CostModel) -> float:
    """Until the last data-parallel rank is done. of_ranks: of those that have some."""
    idle = [Spans() for _ in range(cost.timer.mesh.dp - len(of_ranks))]
    return max(cost.ranks_s([(spans, ()) for spans in [*of_ranks, *idle]]))


def compare_throughput(result: Mapping[str, Any], cost: CostModel, dataset_path: str = "") -> Comparison:
    """All requests at once, without the scheduler: see `closed_batch_s`. ConfigError for data-parallel ranks."""
    config, results, n_ranks = result["config"], result["results"], cost.timer.mesh.dp
    if n_ranks > 1:
        raise ConfigError(
            f"the result is of data_parallel_size = {n_ranks}, and which rank had which request is not in it: results"
            " of one rank, and of `quire bench latency`, can be compared; `quire simulate` deals requests to ranks"
        )
    workload = config.get("workload", "none")
    if workload not in THROUGHPUT_WORKLOADS:
        raise ConfigError("only results of --workload W1, W2, W3 and W5 say which lengths they had")
    path = dataset_path or config.get("dataset_path", "")
    if path and not dataset_path and not pathlib.Path(path).is_file():
        raise ConfigError(
            f"the lengths of {workload} were those of {shown(path)}, which is not here: give the file by --dataset-path"
        )
    requests = throughput_dataset(workload, path)(0)
    lengths = [(len(one.prompt_token_ids), one.output_len) for one in requests]
    seconds = closed_batch_s(
        cost, lengths, config.get("max_num_seqs") or DEFAULT_SEQS,
        config.get("max_num_batched_tokens") or DEFAULT_TOKENS, 1 << 60, PREFIX_LEN.get(workload, 0),
    )  # fmt: skip
    n_tokens = sum(n for _, n in lengths)
    return Comparison(f"{workload}: output", "tok/s", n_tokens / seconds, results["output_tokens_per_second"])


def worst_of(found: Sequence[Comparison]) -> Comparison:
    """The figure of a whole that is farthest off."""
    return max((one for one in found if ":   " not in one.what), key=lambda one: one.factor)


def is_beyond(found: Sequence[Comparison], cost: CostModel) -> bool:
    """Whether the model is off by more than the error bar of its plans."""
    return worst_of(found).factor > 1 + error_bar(cost.timer)


def lines(found: Sequence[Comparison], cost: CostModel) -> list[str]:
    """For people."""
    margin, worst = error_bar(cost.timer), worst_of(found)
    text = [f"{'':<44}{'expected':>12}{'measured':>12}", *(one.line() for one in found), cost.timer.calibration.source]
    says = "beyond" if is_beyond(found, cost) else "within"
    text.append(f"worst: {worst.what}, {100 * worst.error:+.1f} %, {says} the ± {100 * margin:.0f} % of its plans")
    return text


def one_line(result: Mapping[str, Any], arch: ModelArch | None = None) -> str:
    """Model against measurement, at the end of a benchmark; empty where there is nothing to compare. arch: of its
    model; None: its configuration says which."""
    try:
        cost = cost_of_result(result, arch=arch)
        found = [one for one in compare(result, cost) if ":   " not in one.what]
    except ConfigError:
        return ""
    return line_of(found)


def line_of(found: Sequence[Comparison]) -> str:
    """Model against measurement; empty where there is nothing to compare."""
    texts = [f"{one.what} {_number(one.expected)} {one.unit} ({100 * one.error:+.1f} %)" for one in found]
    return "expected: " + "; ".join(texts) if texts else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}" if value < 10 else f"{value:.1f}"
