"""Which implementation runs: the first of the catalogue that takes the inputs, or why none does.

Owns no list and no reason: these are the catalogue's and the implementations'. Invariants: what runs depends on shapes,
types, alignment and the machine, never on values. Where an implementation whose loss matters cannot run, a warning says
what runs instead, and why, once for each reason. Modules are imported when a function of theirs may run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quire.core.errors import ConfigError
from quire.kernels import catalog
from quire.kernels.catalog import Implementation, Slower

logger = logging.getLogger("quire.kernels.choice")
"""Of what is alike in all ranks of a group: rank 0 alone says it."""
own_logger = logging.getLogger("quire.kernels")
"""Of what may befall one of them alone."""


class Candidate(NamedTuple):
    """An implementation, ready to be asked."""

    entry: Implementation
    run: Callable[..., Any]
    """The function that was asked for."""
    condition: Callable[..., Any] | None
    """See `catalog.condition_of`; None: it takes all inputs."""


def select(op: str, function: str, x: torch.Tensor, *arguments: Any) -> Callable[..., Any]:
    """What runs a function of an op, e.g. ("norm", "rms_norm"), on the device and type of x.

    arguments: with x in front, what the op's conditions take. The first call for a device and type imports modules; one
    for new inputs may build kernels (seconds). Raises ConfigError when no implementation can run them.
    """
    listed = candidates(op, function, x.device, x.dtype)
    _, run, condition = listed[0]
    found = None if condition is None else condition(x, *arguments)
    if found is None:
        return run
    return _beyond(listed, found, (x, *arguments)) if isinstance(found, str) else found


def first(listed: Sequence[Candidate], *arguments: Any) -> Callable[..., Any]:
    """The first of these that takes the arguments. Raises ConfigError when none does."""
    _, run, condition = listed[0]
    found = None if condition is None else condition(*arguments)
    if isinstance(found, str):
        return _beyond(listed, found, arguments)
    return run if found is None else found


def _beyond(listed: Sequence[Candidate], reason: str, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The first behind the best, which does not take the arguments for this reason."""
    for entry, run, condition in listed[1:]:
        found = None if condition is None else condition(*arguments)
        if not isinstance(found, str):
            if not isinstance(reason, Slower) and listed[0].entry.missed:
                _warn(listed[0].entry, reason, entry)
            return run if found is None else found
    reasons = "; ".join(f"{one.entry.name}: {one.condition(*arguments)}" for one in listed if one.condition)
    raise ConfigError(f"no implementation of {listed[0].entry.op} can run this: {reasons}")


@functools.cache
def missed(op: str, name: str, reason: str, instead: str) -> None:
    """Say once, as `select` does, that one of the catalogue's implementations does not run for this reason. For those
    that an op asks itself, since they do more or less than one of its functions."""
    if not isinstance(reason, Slower):
        _warn(catalog.entry(op, name), reason, catalog.entry(op, instead))


@functools.cache
def candidates(op: str, function: str, device: torch.device, dtype: torch.dtype) -> tuple[Candidate, ...]:
    """What may run on tensors of this type, best first, to the one that takes all inputs. One that never runs here has
    that reason as its condition. Raises ConfigError for a device that no implementation is for."""
    listed = catalog.selectable(op, function, device.type)
    if not listed:
        known = " or ".join(repr(one) for one in ("cpu", "cuda") if catalog.selectable(op, function, one))
        raise ConfigError(f"{op} has no kernel for device {device.type!r}: use {known}")
    found: list[Candidate] = []
    for entry in listed:
        if (reason := entry.refusal(dtype)) is not None:
            refuse = functools.partial(_always, reason)
            found.append(Candidate(entry, refuse, refuse))
            continue
        module = entry.load()
        found.append(Candidate(entry, getattr(module, function), catalog.condition_of(module)))
        if found[-1].condition is None:
            break
    return tuple(found)


def _always(reason: str, *arguments: object) -> str:
    return reason


@functools.cache
def _warn(best: Implementation, reason: str, instead: Implementation) -> None:
    said = own_logger if instead.name == "reference" else logger
    said.warning("%s: %r runs instead of the faster %r (%s)", best.op, instead.name, best.name, reason)
