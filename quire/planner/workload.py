"""What is asked of an engine, in a few numbers, and what is wanted of it: workloads, objectives of time, prices.

Owns the names, a file's reading and the parsing of `--slo`. Does not own traces (`bench/simulate`).
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean, did_you_mean_and_known

PRICES: Final = (1e-6, 1e6)
"""Least and most dollars an hour of a device."""
MOST_TOKENS: Final = (1 << 24) - 1
"""Of a prompt, and of an output, that is planned, measured or simulated."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens."""

    name: str
    meaning: str
    lengths: tuple[tuple[int, int], ...]
    """(prompt, output) of requests; one stands for all that are alike."""
    shared: int = 0
    """Of the prompt's front, that every request has and the cache keeps."""
    slo: str = ""
    """What its users bear where nothing else is said."""

    @property
    def input(self) -> float:
        """Mean of prompts, without what is shared."""
        return sum(n for n, _ in self.lengths) / len(self.lengths)

    @property
    def output(self) -> float:
        """Mean."""
        return sum(n for _, n in self.lengths) / len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared + max(a + b for a, b in self.lengths)


WORKLOADS: Final = {
    one.name: one
    for one in (
        Workload(name="chat", meaning="a system prompt of 512 that all share, 512 more in, 256 out",
                 lengths=((512, 256),), shared=512, slo="ttft=500ms,tpot=50ms"),
        Workload(name="rag", meaning="4,096 in, 256 out, nothing shared", lengths=((4096, 256),),
                 slo="ttft=2s,tpot=50ms"),
        Workload(name="offline", meaning="1,024 in, 512 out, no user waits", lengths=((1024, 512),)),
    )
}  # fmt: skip


def workload_named(name: str) -> Workload:
    """One of the names, or a JSON file of lists 'input' and 'output' of lengths. ConfigError for anything else."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        near = did_you_mean(name, WORKLOADS)
        raise ConfigError(
            f"--workload {shown(name)} is neither a file (of JSON, with lists 'input' and 'output' of lengths in"
            f" tokens) nor one of {', '.join(WORKLOADS)}{near}"
        )
    return Workload(name=path.stem, meaning=f"lengths of {path.name}", lengths=_lengths(path))


def _lengths(path: pathlib.Path) -> tuple[tuple[int, int], ...]:
    try:
        found = json.loads(path.read_bytes())
        lists = found["input"], found["output"]
        lengths = tuple(zip(*lists, strict=True))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path}: not a JSON file with lists 'input' and 'output' of one length") from None
    for i, pair in enumerate(lengths):
        if any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_TOKENS for n in pair):
            raise ConfigError(
                f"{path}: request {i} has the lengths {shown(pair)}: whole numbers from 1 to {MOST_TOKENS:,} are wanted"
            )
    if not lengths:
        raise ConfigError(f"{path} has no requests")
    return lengths


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of seconds; infinity: none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    @property
    def words(self) -> str:
        """As it is written."""
        limits = (("ttft", self.ttft_s), ("tpot", self.tpot_s))
        return ",".join(f"{name}={1e3 * limit:g}ms" for name, limit in limits if math.isfinite(limit)) or "none"


_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|us)")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_objective(text: str) -> Objective:
    """'ttft=200ms,tpot=20ms', or 'none'. ConfigError that shows the part that cannot be read."""
    return Objective(**parse_limits(text, ("ttft", "tpot")))


def parse_limits(text: str, known: Sequence[str]) -> dict[str, float]:
    """The text of an `--slo` as {'ttft_s': 0.2}, of the `known` times; empty and 'none' set none.

    ConfigError that shows the part that cannot be read, and what is wrong with it.
    """
    found: dict[str, float] = {}
    text = "" if text == "none" else text
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        match = _TIME.fullmatch(value)
        if name not in known:
            names = did_you_mean_and_known(name, known)
            raise ConfigError(
                f"--slo {shown(part)}: {shown(name)} is no time that is known{names}, as in ttft=200ms,tpot=20ms"
            )
        if match is None:
            raise ConfigError(f"--slo {shown(part)} cannot be read: write ttft=200ms,tpot=20ms, with us, ms or s")
        seconds = float(match[1]) * _UNITS[match[2]]
        if not seconds:
            raise ConfigError(f"--slo {shown(part)}: nothing takes no time")
        if f"{name}_s" in found:
            raise ConfigError(f"--slo {shown(text)} says {name} twice")
        found[f"{name}_s"] = seconds
    if text and not found:
        raise ConfigError(f"--slo {shown(text)} sets no limit: write ttft=200ms,tpot=20ms, or none")
    return found


def check_price(price: float) -> float:
    """Dollars an hour of one device. ConfigError where it is none, negative, no number, or no price of anything."""
    least, most = PRICES
    if not least <= price <= most:
        raise ConfigError(
            f"--price {price:g} is out of range: dollars an hour of one device are {least:f} to {most:,.0f}; leave it"
            " out for none"
        )
    return price


def dollars_per_million(price: float, n_devices: int, tokens_per_s: float) -> float:
    """Of output tokens, at so many a second of all devices."""
    return price * n_devices / 3600 / tokens_per_s * 1e6 if tokens_per_s else math.inf
