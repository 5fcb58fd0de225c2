"""How often rows choose each expert, and what each rank has of that: all wait for the one with the most.

Owns how loads are said and the arithmetic of them. Does not own where experts lie (`expert_placement`) nor what a rank
does with its rows (`parts`). Loads are taken to stay as they are, and to be alike in all layers but for their order.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import pathlib
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from quire.core.errors import ConfigError, shown
from quire.planner.expert_placement import imbalance, rearranged, sources

EVEN: Final = "even"
ZIPF: Final = "zipf:"
N_ORDERS: Final = 9
"""Of experts that are drawn where only the shares are known: which of them lie together is chance."""
MOST_EXPONENT: Final = 4.0
MOST_LOAD: Final = 1e300
"""Of an expert: the sum of a layer is finite, whatever the others are."""


class ExpertLoads(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model, and what is done about it."""

    words: str = EVEN
    """As they were said."""
    exponent: float = 0.0
    """The i-th of the experts is chosen as often as i to the minus this (Zipf); 0: all alike."""
    layers: tuple[tuple[float, ...], ...] = ()
    """Loads of each expert, of some layers, in place of an exponent."""
    n_redundant: int | None = None
    """Copies in each layer, of all ranks together, as `--eplb-config` has them; None: experts stay where they are."""
    are_in_turn: bool = False
    """Experts and copies lie as they are loaded: nothing was moved yet."""

    @property
    def are_plain(self) -> bool:
        """Even, and without copies: every rank has the same to do."""
        return not (self.exponent or self.layers or self.n_redundant)

    def copies(self, n_ranks: int) -> int:
        """Slots beyond one of each expert; one rank has all experts, and no copies."""
        return (self.n_redundant or 0) if n_ranks > 1 else 0

    def check(self, family: str, n_experts: Iterable[int]) -> None:
        """n_experts: of each layer of the model; 0: it has none. ConfigError where loads cannot be its."""
        of_layers = set(n_experts) - {0}
        if not of_layers and (self.exponent or self.layers or self.n_redundant is not None):
            flag = "--enable-eplb" if self.n_redundant is not None else "--expert-loads"
            raise ConfigError(f"{family} has no experts: leave {flag} out")
        for n in of_layers:
            self.drawn(n)

    def drawn(self, n_experts: int) -> tuple[tuple[float, ...], ...]:
        """Loads of some layers. ConfigError where they are those of another model."""
        if self.layers:
            if len(self.layers[0]) != n_experts:
                raise ConfigError(
                    f"--expert-loads {shown(self.words)} has {len(self.layers[0])} experts a layer, and the model"
                    f" {n_experts}: give loads of that model"
                )
            return self.layers
        shares = [(i + 1) ** -self.exponent for i in range(n_experts)]
        if not self.exponent:
            return (tuple(shares),)
        return tuple(tuple(random.Random(seed).sample(shares, n_experts)) for seed in range(N_ORDERS))


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A typical layer over ranks."""

    ranks: tuple[tuple[float, ...], ...]
    """Of each rank's slots: that a row takes it."""
    imbalance: float
    """Rows of the rank that has the most, to those of the mean rank; of all layers in the mean."""
    in_turn: float
    """The same if experts lay as they are loaded."""
    n_arriving: int
    """Slots whose experts come from other ranks when they are first rearranged, of the rank that gets most."""


@functools.lru_cache(maxsize=256)
def spread(loads: ExpertLoads, n_experts: int, n_chosen: float, n_ranks: int) -> Spread:
    """Of the layer whose imbalance is nearest to the mean of all; of one rank, that in which two rows choose as much
    alike as in the mean. n_chosen: experts that a row takes."""
    n_slots = n_experts + loads.copies(n_ranks)
    first = [slot % n_experts for slot in range(n_slots)]
    found, before, likeness = [], [], []
    for layer in loads.drawn(n_experts):
        chances = chosen(layer, n_chosen)
        stay = loads.n_redundant is None or loads.are_in_turn or n_ranks == 1
        slots = first if stay else rearranged(chances, first, n_ranks)
        found.append((imbalance(chances, slots, n_ranks), chances, slots))
        before.append(imbalance(chances, first, n_ranks))
        likeness.append(sum(one * one for one in chances) if n_ranks == 1 else found[-1][0])
    mean = statistics.fmean(one for one, _, _ in found)
    typical = statistics.fmean(likeness)
    _, chances, slots = found[min(range(len(found)), key=lambda layer: abs(likeness[layer] - typical))]
    own, n_copies = n_slots // n_ranks, [slots.count(expert) for expert in range(n_experts)]
    of_slots = [chances[expert] / n_copies[expert] for expert in slots]
    arriving = [0] * n_ranks
    for source, slot in sources(first, slots, n_ranks):
        arriving[slot // own] += source // own != slot // own
    return Spread(
        ranks=tuple(tuple(of_slots[at : at + own]) for at in range(0, n_slots, own)), imbalance=mean,
        in_turn=statistics.fmean(before), n_arriving=max(arriving),
    )  # fmt: skip


def chosen(loads: Sequence[float], n_chosen: float) -> list[float]:
    """That a row takes an expert, if it takes `n_chosen` that differ, in proportion to their loads as far as none can
    be taken twice."""
    rest, surely = n_chosen, set[int]()
    order = sorted(range(len(loads)), key=lambda expert: loads[expert])
    totals = list(itertools.accumulate(loads[expert] for expert in order))  # a difference of two would lose small loads
    while order and 0 < totals[-1] <= loads[order[-1]] * rest:
        surely.add(order.pop())
        totals.pop()
        rest -= 1
    total = totals[-1] if order and totals[-1] > 0 else math.inf
    return [1.0 if expert in surely else load / total * rest for expert, load in enumerate(loads)]


def read_loads(text: str, n_redundant: int | None = None) -> ExpertLoads:
    """'even', 'zipf:1.0', or a JSON file: loads of each expert, or a list of such lists, one a layer. ConfigError."""
    if text in ("", EVEN):
        return ExpertLoads(n_redundant=n_redundant)
    if text.startswith(ZIPF):
        return ExpertLoads(words=text, exponent=_exponent(text), n_redundant=n_redundant)
    path = pathlib.Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"--expert-loads {shown(text)} is no file: write even, zipf:1.0, or the name of a JSON file")
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"--expert-loads {shown(text)} is no JSON") from None
    layers = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    n_experts = len(layers[0]) if isinstance(layers[0], list) else 0
    read = tuple(_layer(layer, number, n_experts, text) for number, layer in enumerate(layers))
    return ExpertLoads(words=text, layers=read, n_redundant=n_redundant)


def _exponent(text: str) -> float:
    try:
        value = float(text.removeprefix(ZIPF))
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_EXPONENT:
        raise ConfigError(f"--expert-loads {shown(text)}: an exponent from 0 to {MOST_EXPONENT:g} is wanted: zipf:1.0")
    return value


def _layer(layer: object, number: int, n_experts: int, text: str) -> tuple[float, ...]:
    where = f"--expert-loads {shown(text)}, layer {number}"
    if not (isinstance(layer, list) and len(layer) == n_experts > 0 and all(map(_is_load, layer)) and any(layer)):
        raise ConfigError(
            f"{where}: {shown(layer)} is no list of loads: numbers from 0 on, not all 0, as many as in the first layer"
        )
    for expert, load in enumerate(layer):
        if load > MOST_LOAD:
            raise ConfigError(
                f"{where}: the load of expert {expert} is {shown(load)}, and the most is {MOST_LOAD:g}: only what they"
                " are to each other counts, so divide all by the same number"
            )
    return tuple(map(float, layer))


def _is_load(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
