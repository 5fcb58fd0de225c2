"""`Coding`: how a checkpoint stores its quantised matrices, as data; and which of them are stored how. Torch-free.

Owns the description. Does not own how a config.json says it (its siblings, a file for each method), which tensors of a
file that makes (`compute/weights/codings`), nor what matrices are kept as (`compute/schemes`).
"""

from __future__ import annotations

import enum
import fnmatch
import functools
from collections.abc import Iterable
from typing import Final

import msgspec

from quire.config.fields import Fields
from quire.config.pattern import Pattern
from quire.core.errors import ConfigError, shown

MAX_GROUP: Final = 1 << 17
PATTERN: Final = "re:"
"""In front of a target that is a regular expression."""
MAX_PATTERNS: Final = 256
"""In one checkpoint."""
INSTEAD: Final = (
    "Take a checkpoint of one of these methods, or the bfloat16 checkpoint that it was made from"
    " (--quantization int8 or int4 rounds that while loading)"
)


@enum.unique
class Layout(enum.Enum):
    """Which tensors hold a matrix."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "packed"
    """compressed-tensors' integers in words of 32 bits."""
    SCALED = "scaled"
    """Integers or floats of 8 bits, a byte each, and scales."""
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    NF4 = "nf4"


class Coding(msgspec.Struct, frozen=True, kw_only=True):
    """One way to store matrices [n, k]."""

    layout: Layout
    bits: int
    group: int = 0
    """Inputs of an output that share a scale; 0: all of them."""
    symmetric: bool = True
    """There are no zero points, or they are all in the middle."""
    act_order: bool = False
    """Which inputs share a scale, a table says."""
    zero_less: int = 0
    """What stored zero points are less by."""
    is_float: bool = False
    """Floating numbers, not integers."""
    block_rows: int = 0
    """Outputs that share a scale; 0: each has its own, or all have one."""
    rounds_inputs: bool = False
    """What is multiplied by it is rounded to the same bits."""
    static_inputs: bool = False
    """And with a scale that is stored."""

    @property
    def words(self) -> str:
        """For people."""
        kind = {Layout.MXFP4: "MXFP4", Layout.NVFP4: "NVFP4", Layout.NF4: "NF4"}.get(self.layout)
        kind = kind or (f"FP{self.bits}" if self.is_float else f"int{self.bits}")
        if self.block_rows:
            return f"{kind} in blocks of {self.block_rows} x {self.group}"
        order = ", in the order of activations" if self.act_order else ""
        zeros = "" if self.symmetric else ", with zero points"
        return f"{kind} in groups of {self.group}{zeros}{order}" if self.group else f"{kind} by channel{zeros}{order}"


class Rule(msgspec.Struct, frozen=True):
    """Which matrices have a coding, if they are quantised at all: that, the file says."""

    coding: Coding
    targets: tuple[str, ...] = ()
    """Names of modules, their ends, classes of them, or patterns behind 're:'; empty: all."""

    def holds(self, name: str) -> bool:
        """Of the module of this name in the checkpoint."""
        return not self.targets or any(_matches(target, name) for target in self.targets)


class Codings(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of its quantised matrices."""

    method: str
    """Its name, for people."""
    rules: tuple[Rule, ...]
    """The first that holds counts."""
    left: tuple[str, ...] = ()
    """Modules that its writer left as they were: names, their ends, what holds them, either with `*` in it, or patterns
    behind 're:'. Only what is made without a file needs it."""
    only: tuple[str, ...] = ()
    """The modules that its writer quantised, named as in `left`; empty: all others. As little needed."""

    def of(self, name: str) -> Coding | None:
        """Of the matrix of a module that is quantised."""
        return next((rule.coding for rule in self.rules if rule.holds(name)), None)

    def implied(self, *names: str) -> Coding | None:
        """Of the matrix of a module with one of these names, where nothing but the description is there. Raises
        PatternError."""
        if any(_covers(one, name) for one in self.left for name in names):
            return None
        if self.only and not any(_covers(one, name) for one in self.only for name in names):
            return None
        return next((coding for coding in map(self.of, names) if coding is not None), None)

    @property
    def words(self) -> str:
        """For people."""
        if not self.rules:
            return f"{self.method}, no matrix"
        return f"{self.method}, {' or '.join(dict.fromkeys(rule.coding.words for rule in self.rules))}"


@functools.lru_cache(MAX_PATTERNS)
def pattern_of(target: str) -> Pattern:
    """Of a target behind 're:'. Raises PatternError."""
    return Pattern(target.removeprefix(PATTERN))


def _matches(target: str, name: str) -> bool:
    if target.startswith(PATTERN):
        return pattern_of(target).matches(name)
    return target in ("Linear", name) or name.endswith(f".{target}")


def _covers(left: str, name: str) -> bool:
    if left.startswith(PATTERN):
        return pattern_of(left).matches(name)
    if "*" in left:
        return fnmatch.fnmatchcase(f".{name}.", f"*.{left}.*")
    return left == "Linear" or f".{left}." in f".{name}."


def one_of(fields: Fields, name: str, allowed: Iterable[object], default: object = None) -> object:
    """A field's value, `default` when absent. Raises ConfigError with the value, what is read, and what to do."""
    value, allowed = fields.values.get(name), tuple(allowed)
    value = default if value is None else value
    if not any(value == one and type(value) is type(one) for one in allowed):
        raise unsupported(fields, name, *(str(one).lower() if isinstance(one, bool) else str(one) for one in allowed))
    return value


def unsupported(fields: Fields, name: str, *read: str) -> ConfigError:
    """The error for a key of a quantization_config that asks for what is not read, to be raised by the caller. read:
    what is, one of which must be there."""
    value = fields.values.get(name)
    said = f"{name} = {shown(value)} is not supported" if value is not None else f"{name} is missing"
    which = f"only {read[0]} is read" if len(read) == 1 else f"{', '.join(read[:-1])} and {read[-1]} are read"
    return ConfigError(f"{fields.where}: {said}: {which}. {INSTEAD}.", param="quantization_config")


def group_of(fields: Fields, name: str, default: int | None = None) -> int:
    """A size of groups; 0 for all inputs, which checkpoints write as -1."""
    value = fields.integer(name, -1, MAX_GROUP, default)
    if value == 0:
        raise fields.error(name, "-1 or a number of inputs")
    return max(value, 0)
