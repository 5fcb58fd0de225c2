"""Published scaling laws: loss L(N, D) of N parameters trained on D tokens, and the best N for a budget of FLOPs.

Owns the forms and their constants, each with its source. Does not own fits (`fit`), nor what a budget buys
(`optimum`). FLOPs of training are 6 N D throughout (Kaplan et al. 2020, section 2.1).
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import msgspec

from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known

FLOPS_PER_PARAMETER_TOKEN: Final = 6
"""Two for a multiply and add, thrice: forward, and twice that backward."""
PETAFLOP_DAY: Final = 1e15 * 86400
CONSTANTS: Final = ("E", "A", "alpha", "B", "beta")
"""Of a parametric law, in the order in which they are written."""


class Point(msgspec.Struct, frozen=True):
    """A model and how long it is trained."""

    n_parameters: float
    """Those that a token goes through."""
    n_tokens: float

    @property
    def flops(self) -> float:
        """Of training."""
        return FLOPS_PER_PARAMETER_TOKEN * self.n_parameters * self.n_tokens


class ScalingLaw(Protocol):
    """What all laws say."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def words(self) -> str:
        """Its form with its constants."""
        ...

    def loss(self, n_parameters: float, n_tokens: float) -> float | None:
        """Nats a token; None: the law says what is best, not how good that is."""
        ...

    def optimum(self, flops: float) -> Point:
        """The model of the lowest loss that so many FLOPs can train."""
        ...

    def optimum_of_size(self, n_parameters: float) -> Point:
        """The inverse: the budget of which a model of this size is the best use."""
        ...


class ParametricLaw(msgspec.Struct, frozen=True, kw_only=True):
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2)."""

    name: str
    source: str
    e: float
    """Loss that no model gets below: the entropy of text."""
    a: float
    alpha: float
    b: float
    beta: float

    @property
    def words(self) -> str:
        """See `ScalingLaw`."""
        return f"L = {self.e:.5g} + {self.a:.5g} / N^{self.alpha:.4g} + {self.b:.5g} / D^{self.beta:.4g}"

    def loss(self, n_parameters: float, n_tokens: float) -> float:
        """See `ScalingLaw`."""
        return self.e + self.a * math.pow(n_parameters, -self.alpha) + self.b * math.pow(n_tokens, -self.beta)

    @property
    def exponent(self) -> float:
        """Of the budget in the best number of parameters."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> Point:
        """Hoffmann et al. 2022, equation 4: N = G (C/6)^(beta/(alpha+beta)),
        G = (alpha A / beta B)^(1/(alpha+beta))."""
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        n_pairs = flops / FLOPS_PER_PARAMETER_TOKEN
        n_parameters = g * n_pairs**self.exponent
        return Point(n_parameters, n_pairs / n_parameters)

    def optimum_of_size(self, n_parameters: float) -> Point:
        """See `ScalingLaw`: at the best, alpha A / N^alpha = beta B / D^beta."""
        term = self.alpha * self.a * n_parameters**-self.alpha / (self.beta * self.b)
        return Point(n_parameters, term ** (-1 / self.beta))

    def tokens_to(self, loss: float, n_parameters: float) -> float:
        """Tokens after which a model of this size has this loss; infinite where it never has."""
        rest = loss - self.e - self.a * n_parameters**-self.alpha
        return math.inf if rest <= 0 else (self.b / rest) ** (1 / self.beta)


class KaplanLaw(msgspec.Struct, frozen=True, kw_only=True):
    """L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D (Kaplan et al. 2020, equation 1.5). N is without
    embeddings."""

    name: str
    source: str
    alpha_n: float = 0.076
    alpha_d: float = 0.103
    n_c: float = 6.4e13
    d_c: float = 1.8e13

    @property
    def words(self) -> str:
        """See `ScalingLaw`."""
        exponent = self.alpha_n / self.alpha_d
        return f"L = (({self.n_c:g} / N)^{exponent:.3f} + {self.d_c:g} / D)^{self.alpha_d:g}"

    def loss(self, n_parameters: float, n_tokens: float) -> float:
        """See `ScalingLaw`."""
        of_size = math.pow(self.n_c / n_parameters, self.alpha_n / self.alpha_d)
        return math.pow(of_size + self.d_c / n_tokens, self.alpha_d)

    def optimum(self, flops: float) -> Point:
        """Table 6 there: 1.3e9 parameters for a PF-day of C_min, growing as C_min^0.73. At the critical batch size, as
        there, training takes twice C_min (section 5)."""
        n_parameters = 1.3e9 * (flops / 2 / PETAFLOP_DAY) ** 0.73
        return Point(n_parameters, flops / FLOPS_PER_PARAMETER_TOKEN / n_parameters)

    def optimum_of_size(self, n_parameters: float) -> Point:
        """See `ScalingLaw`."""
        flops = 2 * PETAFLOP_DAY * (n_parameters / 1.3e9) ** (1 / 0.73)
        return Point(n_parameters, flops / FLOPS_PER_PARAMETER_TOKEN / n_parameters)


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """N = N_1 (C / C_1)^a: where the best models were found, without a law of their loss."""

    name: str
    source: str
    n_first: float
    flops_first: float
    exponent: float

    @property
    def words(self) -> str:
        """See `ScalingLaw`."""
        return f"N = {self.n_first:g} (C / {self.flops_first:g})^{self.exponent:.3f}"

    def loss(self, n_parameters: float, n_tokens: float) -> None:
        """See `ScalingLaw`."""
        return

    def optimum(self, flops: float) -> Point:
        """See `ScalingLaw`."""
        n_parameters = self.n_first * (flops / self.flops_first) ** self.exponent
        return Point(n_parameters, flops / FLOPS_PER_PARAMETER_TOKEN / n_parameters)

    def optimum_of_size(self, n_parameters: float) -> Point:
        """See `ScalingLaw`."""
        flops = self.flops_first * (n_parameters / self.n_first) ** (1 / self.exponent)
        return Point(n_parameters, flops / FLOPS_PER_PARAMETER_TOKEN / n_parameters)


def _through(first: tuple[float, float], last: tuple[float, float], name: str, source: str) -> Frontier:
    """The frontier through two rows (parameters, FLOPs) of a table."""
    exponent = math.log(last[0] / first[0]) / math.log(last[1] / first[1])
    return Frontier(name=name, source=source, n_first=first[0], flops_first=first[1], exponent=exponent)


HOFFMANN: Final = "Hoffmann et al. 2022, arXiv 2203.15556"
HOFFMANN_RUNS: Final = "runs of 70M to 16B parameters"
LAWS: Final[dict[str, ScalingLaw]] = {
    law.name: law
    for law in (
        ParametricLaw(
            name="chinchilla", source=f"{HOFFMANN}, approach 3, equation 10; {HOFFMANN_RUNS}",
            e=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28,
        ),
        ParametricLaw(
            name="chinchilla-tex", source=f"{HOFFMANN}, approach 3, with the digits of its TeX source "
            "(found by Besiroglu et al. 2024)", e=1.6934, a=406.4, alpha=0.3392, b=410.7, beta=0.2849,
        ),
        ParametricLaw(
            name="sardana", source="Sardana et al. 2024, arXiv 2401.00448: Hoffmann's approach 3 with three digits",
            e=1.69, a=406.4, alpha=0.336, b=410.7, beta=0.283,
        ),
        ParametricLaw(
            name="besiroglu", source="Besiroglu et al. 2024, arXiv 2404.10102: approach 3 fitted again; "
            f"{HOFFMANN_RUNS}",
            e=1.8172, a=482.01, alpha=0.3478, b=2085.43, beta=0.3658,
        ),
        _through((4e8, 1.92e19), (1e13, 1.30e28), "chinchilla-1", f"{HOFFMANN}, approach 1: ends of table 3"),
        _through((4e8, 1.84e19), (1e13, 1.75e28), "chinchilla-2", f"{HOFFMANN}, approach 2: ends of table A3"),
        _through((4e8, 2.21e19), (1e13, 8.55e28), "chinchilla-3", f"{HOFFMANN}, approach 3: ends of table A3"),
        KaplanLaw(name="kaplan", source="Kaplan et al. 2020, arXiv 2001.08361, equation 1.5 and table 6; runs "
            "of up to 1.5B parameters, embeddings left out"),
    )
}  # fmt: skip
"""Name → law."""
DEFAULT_LAW: Final = "besiroglu"
"""The one of those with a loss that agrees with approaches 1 and 2 and with the model trained to test them."""


def law_named(name: str) -> ScalingLaw:
    """ConfigError with the known names for another."""
    if name not in LAWS:
        raise ConfigError(f"--law {shown(name)} is unknown{did_you_mean_and_known(name, LAWS)}")
    return LAWS[name]


MAX_EXPERTS: Final = 64
"""Twice as many as its authors trained."""
_EXPERTS_START, _EXPERTS_MAX = 2.0732, 290.4521


def mixture_law(n_experts: int) -> ParametricLaw:
    """The law of models whose feed-forwards are `n_experts` experts, one of which a token goes through; N counts the
    active parameters.

    Ludziejewski et al. 2025, arXiv 2502.05172, equation 6 with the constants of table 3: for one number of experts it
    has the form of Hoffmann et al. (their table 4).
    """
    if not 1 <= n_experts <= MAX_EXPERTS:
        raise ConfigError(f"--experts {n_experts} is out of range: 1 to {MAX_EXPERTS} are possible")
    start = 1 / (1 / _EXPERTS_START - 1 / _EXPERTS_MAX)
    log_experts = -math.log(1 / (n_experts - 1 + start) + 1 / _EXPERTS_MAX)
    return ParametricLaw(
        name=f"mixture of {n_experts} experts",
        source="Ludziejewski et al. 2025, arXiv 2502.05172, equation 6, table 3; runs of up to 2.7B "
        "active parameters",
        e=1.3637,
        a=35.91 * math.exp(-0.2285 * log_experts), alpha=0.1889 - 0.0098 * log_experts,
        b=35.98 * math.exp(0.5529 * log_experts), beta=0.1775 + 0.0259 * log_experts,
    )  # fmt: skip


def mixture_total(n_active: float, n_experts: int) -> float:
    """Parameters of such a model in all, embeddings left out: of a layer's 13 d² active ones 9 d² are an expert's,
    in the models of that paper (its appendix E)."""
    return n_active * (4 + 9 * n_experts) / 13
