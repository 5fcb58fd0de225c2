"""`quire plan train`: what training a model takes, or which model a budget is best spent on.

Owns the command's flags and which question they ask. Does not own any figure (`planner/training`, `planner/scaling`)
nor where a model is found (`plan`). Never imports torch, and numpy only for a fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from quire.bench.isoflop import write_isoflop_plot
from quire.bench.plot import check_plot_path
from quire.config.command_line import dashed
from quire.config.flags import named
from quire.core.counts import MOST, format_count, parse_count
from quire.core.errors import ConfigError, shown
from quire.core.units import format_bytes
from quire.planner.accelerators import Accelerator, accelerator_named
from quire.planner.scaling import report as scaling_report
from quire.planner.scaling.laws import DEFAULT_LAW, LAWS, MAX_EXPERTS, ParametricLaw, ScalingLaw, law_named, mixture_law
from quire.planner.scaling.optimum import curves
from quire.planner.scaling.report import Budget, Serving
from quire.planner.training import report as training_report
from quire.planner.training.cluster import device_hours, flops_of_hours
from quire.planner.training.plan import DEFAULT_UTILISATION, TrainingPlan, plan_training
from quire.planner.training.setup import OPTIMIZERS, Checkpointing, TrainingSetup
from quire.planner.workload import check_price

if TYPE_CHECKING:
    from quire.config.arch import ModelArch
    from quire.planner.scaling.fit import Fit

NAME: Final = "train"
MEANING: Final = (
    "With MODEL: whether training it fits on these devices, how long it takes, what it sends and costs. Without: which "
    "model and how many tokens a budget is best spent on, by a published scaling law or one fitted to your runs."
)
NUMBER_BYTES: Final = {"bf16": 2, "fp32": 4, "none": 0}
OF_MODEL: Final = {
    "gpus": 8, "tokens": "", "batch_tokens": "4M", "seq_len": "4096", "micro_batch": 1, "zero": 1, "tp": 1, "pp": 1,
    "no_sequence_parallel": False, "checkpointing": Checkpointing.FULL.value, "optimizer": "adam", "gradients": "bf16",
    "master_weights": "fp32", "store_scores": False, "dropout": False, "count_masked": False,
}  # fmt: skip
"""Options that say how MODEL is trained → their defaults."""
PLOTTED: Final = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of the budget."""
MAX_DEVICES: Final = 1 << 20
HERE: Final = "here"
LEAST_MODEL: Final = 1e6
"""Parameters of the smallest model that a budget is named for."""
MOST_TRAINED: Final = 1e24
"""That a model can be planned to see, or to serve."""
LONGEST: Final = 1 << 30
"""Tokens of a sequence, as in `quire plan`."""
LEAST_SHARE: Final = 1e-4
"""Of the peak."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire plan train MODEL [options]\n       quire plan train --budget FLOPS [options]"
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="as in quire plan: a folder, .gguf file, ..."
    )
    _cluster(parser.add_argument_group("devices"))
    _model(parser.add_argument_group("how MODEL is trained"))
    _budget(parser.add_argument_group("what is best for a budget (numbers as 1e24, 15T, 4M)"))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run, **OF_MODEL)


def _cluster(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--gpu", default="h100", metavar="NAME", help="accelerator, as in quire plan (default: h100)")
    add("--gpus", type=int, metavar="N", help="how many (default: 8)")
    add("--price", type=float, metavar="DOLLARS", help="of one for an hour")
    add(
        "--hfu", type=float, metavar="X",
        help=f"part of the peak that all arithmetic reaches, recomputation counted (default: {DEFAULT_UTILISATION})",
    )  # fmt: skip
    add("--mfu", type=float, metavar="X", help="the same, recomputation not counted; in place of --hfu")


def _model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--tokens", metavar="N", help="tokens of the whole training (default: those that the law takes)")
    add("--batch-tokens", metavar="N", help="tokens of a step (default: 4M)")
    add("--seq-len", metavar="N", help="tokens of a sequence (default: 4096)")
    add("--micro-batch", type=int, metavar="N", help="sequences at once on a replica (default: 1)")
    add(
        "--zero", type=int, choices=range(4),
        help="share out 1: optimizer states, 2: gradients, 3: weights (default: 1)",
    )  # fmt: skip
    add("--tp", type=int, metavar="N", help="tensor-parallel devices (default: 1)")
    add("--pp", type=int, metavar="N", help="pipeline stages (default: 1)")
    add("--no-sequence-parallel", action="store_true", help="tensor-parallel devices keep whole norms and inputs")
    add(
        "--checkpointing", choices=[one.value for one in Checkpointing],
        help="compute again in the backward pass: nothing, scores of attention, or all of a layer (default: full)",
    )  # fmt: skip
    add("--optimizer", choices=list(OPTIMIZERS), help="what it keeps of a parameter (default: adam)")
    add("--gradients", choices=["bf16", "fp32"], help="numbers of gradients (default: bf16)")
    add("--master-weights", choices=["fp32", "none"], help="a copy in float32 (default: fp32)")
    add("--store-scores", action="store_true", help="attention keeps its scores, as before FlashAttention")
    add("--dropout", action="store_true", help="keep masks of dropout, as GPT-3")
    add("--count-masked", action="store_true", help="count pairs that the causal mask hides, as papers do for MFU")


def _budget(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--budget", nargs="+", metavar="FLOPS", help="FLOPs of training, as 1e24; of MODEL: what its tokens follow from"
    )
    add("--gpu-hours", metavar="N", help="hours of one --gpu, in place of FLOPs")
    add("--dollars", metavar="N", help="dollars, with --price, in place of FLOPs")
    add("--sizes", nargs="+", default=[], metavar="N", help="for which budgets models of these sizes are the best")
    add("--law", default="", metavar="NAME", help=f"one of {', '.join(LAWS)} (default: {DEFAULT_LAW})")
    add("--fit", type=named, metavar="RUNS.csv", help="fit the law to these runs: columns N, D and L (loss)")
    add(
        "--experts",
        type=int,
        default=None,
        metavar="N",
        help=f"law of mixtures of 1 to {MAX_EXPERTS} experts, one chosen",
    )
    add("--serve-tokens", default="", metavar="N", help="tokens that the model will serve: count them too")
    add("--serve-mfu", type=float, metavar="X", help="part of the peak then (default: as in training)")
    add(
        "--plot", type=named, metavar="FILE",
        help="loss over size for budgets around it: .html, or .png (matplotlib)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Answer; returns 0. ConfigError for what cannot be asked."""
    _check(arguments)
    if arguments.gpu == HERE:
        raise ConfigError(
            "--gpu here measures this machine for quire plan; training is planned for a device by its name"
        )
    gpu = accelerator_named(arguments.gpu)
    fit = _fit(arguments.fit) if arguments.fit else None
    law = _law(arguments, fit)
    if arguments.model:
        return _run_model(arguments, gpu, law)
    return _run_budget(arguments, gpu, law, fit)


def _check(arguments: argparse.Namespace) -> None:
    for flag, least, most in (
        ("gpus", 1, MAX_DEVICES), ("micro_batch", 1, 1 << 16), ("tp", 1, MAX_DEVICES), ("pp", 1, MAX_DEVICES),
    ):  # fmt: skip
        value = getattr(arguments, flag)
        if not least <= value <= most:
            raise ConfigError(f"{dashed(flag)} {value} is out of range: {least} to {most:,} are possible")
    for flag in ("hfu", "mfu", "serve_mfu"):
        value = getattr(arguments, flag)
        if value is not None and not LEAST_SHARE <= value <= 1:
            raise ConfigError(f"{dashed(flag)} {value:g} is out of range: a part of the peak is {LEAST_SHARE} to 1")
    if arguments.hfu and arguments.mfu:
        raise ConfigError("--hfu and --mfu say the same in two ways: give one of them")
    if arguments.price:
        check_price(arguments.price)
    if sum(map(bool, (arguments.law, arguments.fit, arguments.experts is not None))) > 1:
        raise ConfigError("--law, --fit and --experts each choose a scaling law: give one of them")
    if arguments.plot:
        check_plot_path(arguments.plot)


def _fit(path: str) -> Fit:
    from quire.planner.scaling.fit import fit_runs, read_runs  # with numpy, which nothing else here takes

    return fit_runs(read_runs(path))


def _law(arguments: argparse.Namespace, fit: Fit | None) -> ScalingLaw:
    if fit is not None:
        return fit.law
    if arguments.experts is not None:
        return mixture_law(arguments.experts)
    return law_named(arguments.law or DEFAULT_LAW)


def _flops(arguments: argparse.Namespace, gpu: Accelerator) -> float:
    """Of the budget that is given in one of three ways; 0: none is."""
    ways = [flag for flag in ("budget", "gpu_hours", "dollars") if getattr(arguments, flag) is not None]
    if not ways:
        return 0.0
    if len(ways) > 1:
        raise ConfigError(f"{' and '.join(map(dashed, ways))}: give one budget")
    if arguments.budget:
        number, *unit = arguments.budget
        if [word.lower() for word in unit] not in ([], ["flops"], ["flop"]):
            raise ConfigError(
                f"--budget {' '.join(arguments.budget)}: {shown(' '.join(unit))} is not understood: write FLOPs, as "
                "1e24 flops; hours and dollars are --gpu-hours and --dollars, and MODEL comes first"
            )
        return parse_count(number, "--budget")
    return _flops_paid(arguments, gpu, ways[0])


def _flops_paid(arguments: argparse.Namespace, gpu: Accelerator, way: str) -> float:
    """Of hours, or of dollars that buy them."""
    if way == "dollars" and arguments.price is None:
        raise ConfigError("--dollars needs --price, the dollars of one device for an hour")
    if way == "dollars" and not arguments.price:
        raise ConfigError("--price 0 buys hours without end: with --dollars give one above 0")
    text = getattr(arguments, way)
    given = parse_count(text, dashed(way))
    hours = given / arguments.price if way == "dollars" else given
    flops = flops_of_hours(hours, gpu, _utilisation(arguments))
    if flops > MOST:
        raise ConfigError(
            f"{dashed(way)} {shown(text)} is out of range: on {gpu.name.upper()} it is {flops:.3g} FLOPs, and a budget"
            f" is at most {MOST:g}; give {given * MOST / flops:.3g} or less"
        )
    return flops


def _utilisation(arguments: argparse.Namespace) -> float:
    """Of a budget, which pays for no recomputation that is known here."""
    return float(arguments.mfu or arguments.hfu or DEFAULT_UTILISATION)


def _run_budget(arguments: argparse.Namespace, gpu: Accelerator, law: ScalingLaw, fit: Fit | None) -> int:
    for name, default in OF_MODEL.items():
        if getattr(arguments, name) != default:
            raise ConfigError(f"{dashed(name)} says how MODEL is trained, and there is none: name one, or leave it out")
    flops = _flops(arguments, gpu)
    sizes = [parse_count(size, "--sizes") for size in arguments.sizes]
    if not flops and not sizes and fit is None:
        raise ConfigError(
            "give a MODEL to train, a budget (--budget, --gpu-hours or --dollars), --sizes of models, or runs to --fit"
        )
    used = _utilisation(arguments)
    budget = None
    if flops:
        hours = device_hours(flops, gpu, used)
        budget = Budget(flops=flops, hours=hours, gpu=gpu.name, utilisation=used, price=arguments.price or 0.0)
        _check_budget(law, flops)
    serving = _serving(arguments, law, flops, used)
    if arguments.plot:
        write_isoflop_plot(arguments.plot, curves(law, [flops * part for part in PLOTTED]), f"{law.name}: {law.source}")
    if arguments.json:
        return _print_json(scaling_report.as_json(law, budget, arguments.experts or 0, fit, serving, sizes))
    parts = [scaling_report.fit_lines(fit)] if fit is not None else []
    parts += [scaling_report.size_lines(law, sizes)] if sizes else []
    parts += [scaling_report.budget_lines(law, budget, arguments.experts or 0, fit)] if budget is not None else []
    if serving is not None and isinstance(law, ParametricLaw):
        parts.append(scaling_report.serving_lines(law, flops, serving))
    parts += [[scaling_report.row("plot", arguments.plot)]] if arguments.plot else []
    print("\n\n".join("\n".join(lines) for lines in parts))
    return 0


def _check_budget(law: ScalingLaw, flops: float) -> None:
    """ConfigError where the law has no model of it."""
    best = law.optimum(flops)
    if min(best.n_parameters, best.n_tokens) < 1:
        raise ConfigError(
            f"a budget of {flops:.3g} FLOPs is too small for {law.name}, which takes {best.n_parameters:.2g} "
            f"parameters and {best.n_tokens:.2g} tokens for it; a model of "
            f"{format_count(LEAST_MODEL)} parameters takes {law.optimum_of_size(LEAST_MODEL).flops:.1e}"
        )


def _serving(arguments: argparse.Namespace, law: ScalingLaw, flops: float, used: float) -> Serving | None:
    if not arguments.serve_tokens and not arguments.plot:
        return None
    if not flops:
        raise ConfigError("--serve-tokens and --plot need a budget: give --budget, --gpu-hours or --dollars")
    if not arguments.serve_tokens:
        return None
    if not isinstance(law, ParametricLaw):
        raise ConfigError(f"--serve-tokens needs a law with a loss for every size and length: {law.name} is none")
    n_tokens = parse_count(arguments.serve_tokens, "--serve-tokens", most=MOST_TRAINED)
    return Serving(n_tokens=n_tokens, weight=used / (arguments.serve_mfu or used))


def _setup(arguments: argparse.Namespace) -> TrainingSetup:
    return TrainingSetup(
        n_devices=arguments.gpus, batch_tokens=_token_count(arguments.batch_tokens, "--batch-tokens"),
        seq_len=_whole(arguments.seq_len, "--seq-len"), micro_batch=arguments.micro_batch, zero=arguments.zero,
        tensor_parallel=arguments.tp, pipeline_parallel=arguments.pp,
        sequence_parallel=not arguments.no_sequence_parallel, checkpointing=Checkpointing(arguments.checkpointing),
        optimizer=arguments.optimizer, gradient_bytes=NUMBER_BYTES[arguments.gradients],
        master_bytes=NUMBER_BYTES[arguments.master_weights], stores_scores=arguments.store_scores,
        dropout=arguments.dropout,
    )  # fmt: skip


def _token_count(text: str, flag: str) -> float:
    return parse_count(text, flag, least=1, most=MOST_TRAINED)


def _whole(text: str, flag: str) -> int:
    value = parse_count(text, flag, least=1, most=LONGEST)
    if value != int(value):
        raise ConfigError(f"{flag} {shown(text)} is not a whole number")
    return int(value)


def _run_model(arguments: argparse.Namespace, gpu: Accelerator, law: ScalingLaw) -> int:
    from quire.cli.plan import find_arch  # it imports this module

    if arguments.serve_tokens or arguments.plot or arguments.sizes:
        raise ConfigError("--serve-tokens, --sizes and --plot are about the best model for a budget: leave MODEL out")
    arch = find_arch(arguments.model)
    plan = plan_training(
        arch, _setup(arguments), gpu, utilisation=arguments.hfu or 0.0, model_utilisation=arguments.mfu or 0.0,
        masked=arguments.count_masked,
    )  # fmt: skip
    _warn(arguments, arch, plan.setup)
    n_tokens, why = _tokens(arguments, plan, gpu, law)
    price = arguments.price or 0.0
    loss = law.loss(plan.n_active, n_tokens)
    if arguments.json:
        found = training_report.as_json(arch, plan, n_tokens, price)
        _print_json(found | {"law": law.name, "loss": loss})
        return _said(plan, arguments.model, gpu)
    expected = "" if loss is None else f"{loss:.3f} by {law.name}"
    if expected and not arguments.experts and plan.n_active < plan.n_parameters / 2:
        expected += ", of a dense model with as many parameters as a token goes through"
    print("\n".join(training_report.lines(arch, plan, n_tokens, why, price, expected)))
    return _said(plan, arguments.model, gpu)


def _said(plan: TrainingPlan, model: str, gpu: Accelerator) -> int:
    """The exit code: 1 where the model does not fit, which is said behind all else."""
    if plan.fits:
        return 0
    lacking = format_bytes(plan.fullest.total - gpu.memory_bytes)
    where = f"{plan.setup.n_devices:,} x {gpu.name.upper()}"
    print(f"quire plan train: {model} does not fit on {where} so: {lacking} too much", file=sys.stderr)
    return 1


def _warn(arguments: argparse.Namespace, arch: ModelArch, setup: TrainingSetup) -> None:
    """Says what is otherwise than asked, or longer than the model knows."""
    found = []
    if 0 < arch.max_position < setup.seq_len:
        found.append(f"--seq-len {setup.seq_len:,} is beyond the model's context of {arch.max_position:,} tokens")
    least = setup.micro_tokens * setup.n_replicas
    if setup.batch_tokens < least:
        found.append(
            f"--batch-tokens {arguments.batch_tokens} is less than a micro-batch on every replica: a step takes "
            f"{format_count(least)} tokens"
        )
    for text in found:
        print(f"quire plan train: {text}", file=sys.stderr)


def _tokens(
    arguments: argparse.Namespace, plan: TrainingPlan, gpu: Accelerator, law: ScalingLaw
) -> tuple[float, str]:  # fmt: skip
    """Of the whole training, and where the number comes from if it was not given."""
    flops = _flops(arguments, gpu)
    if flops and arguments.tokens:
        raise ConfigError("--tokens and a budget both say how long MODEL is trained: give one of them")
    if flops:
        n_tokens = flops / plan.flops.training
        if not 1 <= n_tokens <= MOST_TRAINED:
            raise ConfigError(
                f"a budget of {flops:.3g} FLOPs pays for {n_tokens:.3g} tokens of MODEL, and 1 to {MOST_TRAINED:g} are"
                " possible: give another"
            )
        return n_tokens, ", what the budget pays for"
    if arguments.tokens:
        return _token_count(arguments.tokens, "--tokens"), ""
    found = law.optimum_of_size(plan.n_active).n_tokens
    return found, f" ({found / plan.n_active:.3g} a parameter: by the law {law.name} the best use of the compute)"


def _print_json(found: dict[str, Any]) -> int:
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


__all__ = ["MEANING", "NAME", "add_arguments", "run"]
