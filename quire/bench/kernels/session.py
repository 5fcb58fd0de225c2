"""One run of `quire bench kernels`: options in, results out."""

from __future__ import annotations

import torch

from quire.bench.kernels import measurement, peers, steadiness
from quire.bench.kernels.case import Case, Check, Setting
from quire.bench.kernels.limits import measure_limits
from quire.bench.kernels.measurement import Progress, Results
from quire.bench.kernels.registry import OPS
from quire.bench.kernels.timing import timer
from quire.bench.options import KernelBenchOptions
from quire.core import env
from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known
from quire.kernels import catalog

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def device_type(asked: str) -> str:
    """'cpu' or 'cuda'. ConfigError when a GPU is asked for and there is none."""
    obstacle = catalog.cuda_obstacle()
    if asked == "auto":
        return "cpu" if obstacle else "cuda"
    if asked == "cuda" and obstacle:
        raise ConfigError(f"--device cuda: {obstacle}")
    return asked


def chosen_ops(text: str) -> list[str]:
    """`attention,norm` → the ops; nothing: all. ConfigError for an unknown one."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in OPS:
            raise ConfigError(f"--ops {shown(name)} is not an op{did_you_mean_and_known(name, OPS)}.")
    return names or list(OPS)


def chosen(options: KernelBenchOptions, setting: Setting) -> tuple[list[Case], list[Check]]:
    """What the options select. ConfigError when that is nothing."""
    cases: list[Case] = []
    checks: list[Check] = []
    for name in chosen_ops(options.ops):
        make_cases, make_checks = OPS[name]
        cases += [case for case in make_cases(name, setting) if case.quick or not options.quick or options.cases]
        checks += make_checks(name, setting)
    if options.cases:
        asked = options.cases.split(",")
        wanted = {case.name for case in cases if any(text in f"{case.op} {case.name}" for text in asked)}
        wanted |= {case.baseline for case in cases if case.name in wanted}
        cases = [case for case in cases if case.name in wanted]
    if not cases:
        raise ConfigError(f"--cases {shown(options.cases)} selects no case of {options.ops or 'all ops'}")
    return cases, _chosen_checks(options, cases, checks)


def _chosen_checks(options: KernelBenchOptions, cases: list[Case], checks: list[Check]) -> list[Check]:
    """Those of what is timed, whatever the options; in a run of all cases, all."""
    kinds = {(case.op, case.kind) for case in cases}
    is_more = [not options.cases and (check.quick or not options.quick) for check in checks]
    pairs = zip(checks, is_more, strict=True)
    return [check for check, more in pairs if more or (check.op, check.name) in kinds]


def measure(options: KernelBenchOptions) -> tuple[Results, str]:
    """Run it; the results, and the device in words."""
    progress = Progress()
    # The engine's place for compiled kernels, so that neither compiles what the other has. Triton reads it later.
    env.set_for_children("TRITON_CACHE_DIR", str(env.cache_folder() / "triton"))
    setting = Setting(timer(device_type(options.device)), DTYPES[options.dtype], options.quick)
    torch.manual_seed(0)
    cases, checks = chosen(options, setting)
    progress.say(f"limits of {setting.timer.name}")
    results = Results(measure_limits(setting.timer, setting.dtype))
    if setting.device.type == "cuda" and not peers.has_flashinfer():
        results.notes.append("FlashInfer is not installed: it is not among the peers")
    _watch(setting, results, progress)
    measurement.prepare(cases, progress)
    if checks:
        progress.say(f"{len(checks)} checks against float64")
    results.accuracies = measurement.check_all(checks, progress)
    measurement.time_all(cases, setting, results, options.time_limit, progress)
    results.limits = results.limits.better(measure_limits(setting.timer, setting.dtype))
    _watch(setting, results, progress)
    measurement.judge(cases, results)
    if setting.device.type == "cpu" and (said := measurement.beyond_memory(results.timings)):
        results.notes.append(said)
    progress.say("done")
    return results, setting.timer.name


def _watch(setting: Setting, results: Results, progress: Progress) -> None:
    """Before and after the cases: one warning if a CPU is too busy to be measured."""
    if setting.device.type != "cpu" or any(note.startswith("WARNING") for note in results.notes):
        return
    warning = steadiness.of_probe() or steadiness.of_times(results.timings, torch.get_num_threads())
    if warning:
        progress.say(warning)
        results.notes.append(warning)
