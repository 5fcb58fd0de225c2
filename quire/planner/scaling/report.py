"""What a budget buys, in words: the best model under a law, what other laws say, cheap inference, a fit with intervals.

Owns the tables and their JSON. Does not own any figure (`optimum`, `fit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from quire.core.counts import format_count, format_whole
from quire.core.units import counted
from quire.planner.scaling.laws import CONSTANTS, LAWS, KaplanLaw, ParametricLaw, Point, ScalingLaw, mixture_total
from quire.planner.scaling.optimum import Lifetime, cheapest_lifetime, lifetime

if TYPE_CHECKING:
    from quire.planner.scaling.fit import Fit  # it takes numpy

WIDTH: Final = 16


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What is spent on training."""

    flops: float
    hours: float
    """Of one device."""
    gpu: str
    utilisation: float
    price: float = 0.0
    """Dollars an hour; 0: not known."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What comes after training."""

    n_tokens: float
    weight: float
    """What a FLOP of serving costs in FLOPs of training."""


def row(name: str, text: str) -> str:
    return f"{name:<{WIDTH}}{text}"


def _point(law: ScalingLaw, point: Point) -> str:
    loss = law.loss(point.n_parameters, point.n_tokens)
    text = f"{format_count(point.n_parameters)} parameters on {format_count(point.n_tokens)} tokens"
    text += f", {point.n_tokens / point.n_parameters:.3g} a parameter"
    return text if loss is None else f"{text}, loss {loss:.4f}"


def size_lines(law: ScalingLaw, sizes: list[float]) -> list[str]:
    """Budgets of which models of these sizes are the best use, as table 3 of Hoffmann et al. 2022."""
    found = [row("law", f"{law.name}: {law.words}"), row("", law.source)]
    found.append(f"{'parameters':<{WIDTH}}{'FLOPs':>10}{'tokens':>9}{'a parameter':>13}{'loss':>8}")
    for size in sizes:
        point = law.optimum_of_size(size)
        loss = law.loss(point.n_parameters, point.n_tokens)
        found.append(
            f"{format_count(size):<{WIDTH}}{point.flops:>10.2e}{format_count(point.n_tokens):>9}"
            f"{point.n_tokens / size:>13.3g}{'-' if loss is None else f'{loss:.3f}':>8}"
        )
    return found


def budget_lines(law: ScalingLaw, budget: Budget, n_experts: int, fit: Fit | None) -> list[str]:
    """The best model for a budget, and what other laws take for it."""
    best = law.optimum(budget.flops)
    cost = f", ${format_whole(budget.hours * budget.price)} at ${budget.price:g} an hour" if budget.price else ""
    hours = f"{format_whole(budget.hours)} {budget.gpu}-hours at {budget.utilisation:.2f} of the peak{cost}"
    found = [
        row("budget", f"{budget.flops:.3g} FLOPs: {hours}"),
        row("law", f"{law.name}: {law.words}"),
        row("", law.source),
        row("best model", _point(law, best)),
    ]
    if n_experts:
        total = mixture_total(best.n_parameters, n_experts)
        found.append(row("", f"active; {format_count(total)} in all, embeddings left out"))
    if fit is not None:
        sizes, tokens = fit.optimum_intervals(budget.flops)
        found.append(row("95 % of fits", f"{_range(sizes)} parameters on {_range(tokens)} tokens"))
    return [*found, "", *_laws(budget.flops)]


def _laws(flops: float) -> list[str]:
    found = [f"{'law':<{WIDTH}}{'parameters':>11}{'tokens':>9}{'a parameter':>13}{'loss':>8}"]
    for law in LAWS.values():
        best = law.optimum(flops)
        loss = law.loss(best.n_parameters, best.n_tokens)
        found.append(
            f"{law.name:<{WIDTH}}{format_count(best.n_parameters):>11}{format_count(best.n_tokens):>9}"
            f"{best.n_tokens / best.n_parameters:>13.3g}{'-' if loss is None else f'{loss:.3f}':>8}"
        )
    return [*found, "Losses of different laws are of different texts and tokenizers: compare models, not losses."]


def lifetimes(law: ParametricLaw, flops: float, serving: Serving) -> tuple[Lifetime, Lifetime]:
    """Of the best model for a budget, and of the cheapest one of the same loss, training and serving together."""
    plain = lifetime(law, law.optimum(flops), serving.n_tokens, serving.weight)
    return plain, cheapest_lifetime(law, plain.loss, serving.n_tokens, serving.weight)


def serving_lines(law: ParametricLaw, flops: float, serving: Serving) -> list[str]:
    """Both of these."""
    plain, cheap = lifetimes(law, flops, serving)
    weight = f", each FLOP as {serving.weight:.3g} of training" if serving.weight != 1 else ""
    found = [f"with {format_count(serving.n_tokens)} tokens served{weight}"]
    for name, one in (("best to train", plain), ("best in all", cheap)):
        shares = f"{one.point.flops:.3g} to train + {one.serving_flops:.3g} to serve = {one.total_flops:.3g} FLOPs"
        found += [row(f"  {name}", _point(law, one.point)), row("", shares)]
    saved = 1 - cheap.total_flops / plain.total_flops
    times = cheap.point.n_tokens / plain.point.n_tokens
    return [*found, row("  saved", f"{saved:.1%}, with {times:.3g} times the tokens (Sardana et al. 2024)")]


def fit_lines(fit: Fit) -> list[str]:
    """Constants with their intervals."""
    law, intervals, n = fit.law, fit.intervals(), fit.n_outliers
    values = dict(zip(CONSTANTS, (law.e, law.a, law.alpha, law.b, law.beta), strict=True))
    again = f"; {counted(fit.n_repeated, 'run')} repeated, which narrows the intervals" if fit.n_repeated else ""
    outliers = counted(n, "outlier") + again
    found = [
        row("fit", f"{fit.n_runs} runs, residuals of {fit.rms_residual:.2%}, {outliers}"),
        row("", law.words),
        f"{'constant':<{WIDTH}}{'value':>10}   95 % of {len(fit.samples)} resampled fits",
    ]
    for name, value in values.items():
        low, high = intervals[name]
        found.append(f"{name:<{WIDTH}}{value:>10.4g}   {low:.4g} to {high:.4g}")
    low, high = fit.exponent_interval()
    return [*found, f"{'N grows as C^':<{WIDTH}}{law.exponent:>10.3f}   {low:.3f} to {high:.3f}"]


def _range(interval: tuple[float, float]) -> str:
    return f"{format_count(interval[0])} to {format_count(interval[1])}"


def _point_json(law: ScalingLaw, point: Point) -> dict[str, Any]:
    loss = law.loss(point.n_parameters, point.n_tokens)
    return {"n_parameters": point.n_parameters, "n_tokens": point.n_tokens, "flops": point.flops, "loss": loss}


def as_json(
    law: ScalingLaw,
    budget: Budget | None,
    n_experts: int,
    fit: Fit | None,
    serving: Serving | None,
    sizes: list[float],
) -> dict[str, Any]:
    """The same as plain values."""
    found: dict[str, Any] = {"law": {"name": law.name, "source": law.source}}
    if isinstance(law, (ParametricLaw, KaplanLaw)):
        found["law"] = msgspec.to_builtins(law)
    if fit is not None:
        found["fit"] = {
            "n_runs": fit.n_runs, "rms_residual": fit.rms_residual, "n_outliers": fit.n_outliers,
            "n_repeated": fit.n_repeated,
            "intervals": fit.intervals(), "exponent": fit.law.exponent, "exponent_interval": fit.exponent_interval(),
        }  # fmt: skip
    if sizes:
        found["sizes"] = [_point_json(law, law.optimum_of_size(size)) for size in sizes]
    if budget is None:
        return found
    best = law.optimum(budget.flops)
    found |= {"budget": msgspec.to_builtins(budget), "best": _point_json(law, best)}
    found["other_laws"] = {name: _point_json(one, one.optimum(budget.flops)) for name, one in LAWS.items()}
    if n_experts:
        found["best"]["n_parameters_in_all"] = mixture_total(best.n_parameters, n_experts)
    if fit is not None:
        found["best"]["intervals"] = dict(
            zip(("n_parameters", "n_tokens"), fit.optimum_intervals(budget.flops), strict=True)
        )
    if serving is not None and isinstance(law, ParametricLaw):
        for name, one in zip(("plain", "cheapest"), lifetimes(law, budget.flops, serving), strict=True):
            found[name] = _point_json(law, one.point) | {
                "serving_flops": one.serving_flops,
                "total_flops": one.total_flops,
            }
    return found
