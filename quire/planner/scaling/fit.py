"""Fits L(N, D) = E + A / N^alpha + B / D^beta to runs, as Hoffmann et al. 2022 do (section 3.3, appendix D.2).

Least Huber loss of log residuals, over many starts at once; the bootstrap gives the intervals. Owns reading runs and
the optimiser: Levenberg-Marquardt with the weights of the Huber loss, batched in numpy. Invariant: logarithms of N and
D are taken from their means, else A and alpha cannot be told apart numerically.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
from typing import Final

import numpy as np

from quire.core.errors import ConfigError, shown
from quire.core.files import read_regular
from quire.planner.scaling.laws import CONSTANTS, ParametricLaw

COLUMNS: Final = {"N": ("n", "parameters", "n_parameters"), "D": ("d", "tokens", "n_tokens"), "L": ("l", "loss")}
"""What a run says → names of its column, whatever their case."""
LEAST_RUNS: Final = 8
"""Five constants, and some runs to tell how well they are known."""
LEAST_SIZES: Final = 3
"""Different N, and different D: two points lie on a power law whatever E is."""
HUBER: Final = 1e-3
MAX_BYTES: Final = 1 << 26
MAX_RUNS: Final = 10_000
BEYOND: Final = "\n"
"""Key of values that no column has, which is no name of one."""
MAX_NUMBERS: Final = 2_000_000
"""Residuals that are there at once: more starts or samples go one part after another."""
MAX_ITERATIONS: Final = 300
STEADY: Final = 1e-9
"""Relative fall of the objective below which a start has arrived."""
CONFIDENCE: Final = 0.95

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Runs:
    """Finished trainings, one an entry of each array."""

    n_parameters: Array
    n_tokens: Array
    losses: Array

    def __len__(self) -> int:
        return len(self.losses)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law and how well it is known."""

    law: ParametricLaw
    n_runs: int
    samples: Array
    """[n_samples, 5]: the constants of each resampled set of runs, in the order of `CONSTANTS`."""
    rms_residual: float
    """Of log losses, runs beyond `n_outliers` left out."""
    n_outliers: int
    """Runs further from the law than ten times the Huber threshold."""
    n_repeated: int = 0
    """Runs that are others once more, number for number: they count as often as they stand there."""

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Constant → its 95 % interval."""
        return {name: _interval(self.samples[:, i]) for i, name in enumerate(CONSTANTS)}

    def exponent_interval(self) -> tuple[float, float]:
        """Of the budget's exponent in the best number of parameters."""
        return _interval(self.samples[:, 4] / (self.samples[:, 2] + self.samples[:, 4]))

    def optimum_intervals(self, flops: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Of the best number of parameters and of tokens for a budget."""
        points = [_law(sample).optimum(flops) for sample in self.samples]
        sizes, tokens = np.array([p.n_parameters for p in points]), np.array([p.n_tokens for p in points])
        return _interval(sizes), _interval(tokens)


def read_runs(path: str) -> Runs:
    """The runs of a CSV file with the columns N, D and L. ConfigError names the line of a wrong value."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--fit {shown(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--fit {shown(path)} is not a text file in UTF-8: {error.reason}") from None
    reader = csv.DictReader(io.StringIO(text), restkey=BEYOND)
    given = {name.strip().lower(): name for name in reader.fieldnames or () if name}
    columns = {}
    for what, names in COLUMNS.items():
        found = [given[name] for name in names if name in given]
        if not found:
            raise ConfigError(
                f"--fit {shown(path)} has no column {what}: the first line must name the columns N (parameters), D "
                f"(tokens) and L (loss in nats a token), with commas between; it has "
                f"{', '.join(map(shown, given.values())) or 'none'}"
            )
        columns[what] = found[0]
    rows = []
    try:
        for row in reader:
            if any((value or "").strip() for value in row.values() if not isinstance(value, list)):
                where = f"--fit {shown(path)}, line {reader.line_num}"
                if any(row.get(BEYOND, ())):
                    raise ConfigError(
                        f"{where}: it has more values than the first line has names; decimals have a point"
                    )
                rows.append([_value(row[column], what, where) for what, column in columns.items()])
    except csv.Error as error:
        raise ConfigError(f"--fit {shown(path)}, line {reader.line_num}: {error}") from None
    return Runs(*np.array(rows, dtype=np.float64).reshape(-1, 3).T)


def _value(text: str | None, what: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ConfigError(f"{where}: {what} = {shown(text or '')} is not a number") from None
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: {what} = {value:g} is not allowed: it must be a number above 0")
    return value


def fit_runs(runs: Runs, *, n_samples: int = 400, seed: int = 0) -> Fit:
    """The law of these runs. ConfigError where they are too few or too alike, or do not show a law."""
    for what, values in (("N", runs.n_parameters), ("D", runs.n_tokens)):
        n_kinds = len(np.unique(np.round(np.log(values), 3)))
        if len(runs) < LEAST_RUNS or n_kinds < LEAST_SIZES:
            raise ConfigError(
                f"a fit of {len(CONSTANTS)} constants needs at least {LEAST_RUNS} runs with at least {LEAST_SIZES} "
                f"different {what}; these are {len(runs)} with {n_kinds}: train more, of other sizes and lengths"
            )
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"{len(runs):,} runs are more than a fit takes: give at most {MAX_RUNS:,} of them")
    points = _Points(runs)
    starts = points.starts()
    everything = np.ones((1, len(runs)))
    found, objective = points.descend(starts, np.repeat(everything, len(starts), 0))
    best = found[np.argmin(objective)]
    constants = points.constants(best[None])[0]
    if not np.all(np.isfinite(constants)) or constants[2] <= 0 or constants[4] <= 0:
        raise ConfigError(
            f"these {len(runs)} runs show no law: the best fit has alpha = {constants[2]:.3g} and beta = "
            f"{constants[4]:.3g}, so that loss does not fall with N or with D: add runs of other sizes and lengths"
        )
    resampled = np.random.default_rng(seed).multinomial(len(runs), np.full(len(runs), 1 / len(runs)), n_samples)
    samples, _ = points.descend(np.repeat(best[None], n_samples, 0), resampled.astype(np.float64))
    residuals = points.residuals(best[None])[0][0]
    is_outlier = np.abs(residuals) > 10 * HUBER + 3 * 1.4826 * np.median(np.abs(residuals))
    rms = math.sqrt(float(np.mean(residuals[~is_outlier] ** 2)))
    n_repeated = len(runs) - len(np.unique(np.stack([runs.n_parameters, runs.n_tokens, runs.losses]), axis=1).T)
    return Fit(_law(constants), len(runs), points.constants(samples), rms, int(is_outlier.sum()), n_repeated)


def _law(constants: Array) -> ParametricLaw:
    e, a, alpha, b, beta = map(float, constants)
    return ParametricLaw(name="fit", source="the runs given", e=e, a=a, alpha=alpha, b=b, beta=beta)


def _interval(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


class _Points:
    """The runs as the optimiser sees them; a place is (log A', log B', log E, alpha, beta), at the mean of all logs."""

    def __init__(self, runs: Runs) -> None:
        self.log_n, self.log_d, self.log_loss = map(np.log, (runs.n_parameters, runs.n_tokens, runs.losses))
        self.mean_n, self.mean_d = float(self.log_n.mean()), float(self.log_d.mean())
        self.x, self.y = self.log_n - self.mean_n, self.log_d - self.mean_d

    def starts(self) -> Array:
        """A grid: what part of the lowest loss is E, how the rest is shared, and both exponents."""
        lowest, middle = float(np.exp(self.log_loss.min())), float(np.exp(np.median(self.log_loss)))
        grid = itertools.product((0.2, 0.5, 0.8, 0.95), (0.2, 0.5, 0.8), (0.1, 0.3, 0.5, 1.0), (0.1, 0.3, 0.5, 1.0))
        return np.array([
            (math.log(share * rest), math.log((1 - share) * rest), math.log(e), alpha, beta)
            for of_lowest, share, alpha, beta in grid
            for e, rest in [(of_lowest * lowest, max(middle - of_lowest * lowest, 1e-3 * middle))]
        ])  # fmt: skip

    def residuals(self, places: Array) -> tuple[Array, Array]:
        """[S, n] log of the law less log of the loss, and [S, 3, n] what each term has of the law."""
        a, b, e, alpha, beta = (column[:, None] for column in places.T)
        terms = np.stack([a - alpha * self.x, b - beta * self.y, e + 0 * self.x], 1)
        top = terms.max(1, keepdims=True)
        weights = np.exp(terms - top)
        total = weights.sum(1, keepdims=True)
        return (top + np.log(total))[:, 0] - self.log_loss, weights / total

    def objective(self, residuals: Array, counts: Array) -> Array:
        """[S]: the Huber loss, a run counted as often as `counts` says."""
        size = np.abs(residuals)
        of_run = counts * np.where(size <= HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        found: Array = of_run.sum(1)
        return found

    def descend(self, places: Array, counts: Array) -> tuple[Array, Array]:
        """Where each start ends, and the objective there."""
        size = max(1, MAX_NUMBERS // counts.shape[1])
        parts = [self._descend(places[i : i + size], counts[i : i + size]) for i in range(0, len(places), size)]
        return np.concatenate([place for place, _ in parts]), np.concatenate([value for _, value in parts])

    def _descend(self, places: Array, counts: Array) -> tuple[Array, Array]:
        places, damping = places.copy(), np.full(len(places), 1e-2)
        residuals, shares = self.residuals(places)
        value = self.objective(residuals, counts)
        going = np.arange(len(places))
        for _ in range(MAX_ITERATIONS):
            step = self._step(residuals[going], shares[going], counts[going], damping[going])
            tried = places[going] + step
            new_residuals, new_shares = self.residuals(tried)
            new_value = self.objective(new_residuals, counts[going])
            is_better = new_value < value[going]
            fall = np.where(is_better, 1 - new_value / np.maximum(value[going], 1e-300), 1.0)
            moved = going[is_better]
            places[moved], value[moved] = tried[is_better], new_value[is_better]
            residuals[moved], shares[moved] = new_residuals[is_better], new_shares[is_better]
            damping[going] = np.clip(np.where(is_better, damping[going] * 0.3, damping[going] * 5), 1e-12, 1e12)
            going = going[(fall > STEADY) & (damping[going] < 1e8)]
            if not len(going):
                break
        return places, value

    def _step(self, residuals: Array, shares: Array, counts: Array, damping: Array) -> Array:
        """[S, 5]: of Gauss and Newton, with the weights that make squares a Huber loss, damped."""
        to_n, to_d, to_e = shares[:, 0], shares[:, 1], shares[:, 2]
        slopes = np.stack([to_n, to_d, to_e, -self.x * to_n, -self.y * to_d], 2)
        weights = counts * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-300))
        weighted = slopes * weights[:, :, None]
        curvature = np.einsum("snk,snl->skl", weighted, slopes)
        diagonal = np.einsum("skk->sk", curvature)
        ridge = damping[:, None] * diagonal + 1e-12 * (diagonal.max(1, keepdims=True) + 1e-30)
        step = np.linalg.solve(
            curvature + ridge[:, :, None] * np.eye(5), -np.einsum("snk,sn->sk", weighted, residuals)[:, :, None]
        )
        return np.clip(step[:, :, 0], -1.0, 1.0)

    def constants(self, places: Array) -> Array:
        """[S, 5] in the order of `CONSTANTS`, from [S, 5] places."""
        a, b, e, alpha, beta = places.T
        return np.stack([np.exp(e), np.exp(a + alpha * self.mean_n), alpha, np.exp(b + beta * self.mean_d), beta], 1)
