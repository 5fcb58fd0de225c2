"""`--enable-eplb`, `--eplb-config`: copies of hot experts, and when experts move between ranks; vLLM's spelling.

EPLB: expert parallelism load balancer. Owns the keys, their bounds and what is refused by name. Does not own where an
expert goes (`planner/expert_placement`) nor how it gets there (`compute/expert_balancer`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from quire.core.errors import ConfigError, shown

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig

Steps = Annotated[int, Meta(ge=1, le=1 << 30)]
MAX_REDUNDANT: Final = 1 << 18


class EplbConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies, and when experts move. Defaults are vLLM's."""

    num_redundant_experts: Annotated[int, Meta(ge=0, le=MAX_REDUNDANT)] = 0
    """Copies in each layer beyond one of each expert, of all ranks together."""
    window_size: Steps = 1000
    """Loads of so many steps before a rearrangement count for it."""
    step_interval: Steps = 3000
    """Steps from one rearrangement to the next."""
    policy: Literal["default"] = "default"
    """Heaviest experts are copied, then dealt out, the heaviest first, to the rank with the least."""


REFUSED: Final = {
    "log_balancedness log_balancedness_interval": "each rearrangement is logged, and in /metrics: leave it out",
    "use_async communicator": "experts move between steps, one layer at a time: leave it out",
}
"""Keys of vLLM → why they mean nothing here."""


def read_eplb(config: EngineConfig) -> EplbConfig | None:
    """What was asked for; None: experts stay where they are. Raises ConfigError."""
    options = config.eplb_config
    if not config.enable_eplb:
        if options:
            raise _error("nothing is balanced without enable_eplb: add --enable-eplb, or leave it out", options)
        return None
    _refuse(options)
    try:
        found = msgspec.convert(dict(options), EplbConfig)
    except msgspec.ValidationError as error:
        raise _error(str(error), options) from None
    if found.window_size > found.step_interval:
        raise _error(
            f"window_size = {found.window_size} is more than the step_interval = {found.step_interval} steps between"
            " two rearrangements: make it at most that",
            options,
        )
    return found


def balanced(config: EngineConfig) -> EplbConfig | None:
    """The same, of an engine whose ranks can do it. Raises ConfigError."""
    found = read_eplb(config)
    if found is None:
        return None
    why = ""
    if not config.enable_expert_parallel:
        why = "each rank has a part of every expert, so that all have the same load: add --enable-expert-parallel"
    elif config.tensor_parallel_size * config.data_parallel_size == 1:
        why = "one rank has all experts: add --tensor-parallel-size or --data-parallel-size"
    elif config.pipeline_parallel_size > 1:
        why = (
            f"pipeline_parallel_size = {config.pipeline_parallel_size}: experts of stages do not move yet: leave one of"
            " the two out"
        )
    elif config.lora_experts:
        why = "adapters of experts do not move with them: leave --lora-experts out"
    if why:
        raise ConfigError(f"enable_eplb = True, but {why}, or leave --enable-eplb out", param="enable_eplb")
    return found


def check_copies(n_experts: int, n_redundant: int, n_ranks: int) -> None:
    """ConfigError where the experts of a layer and their copies cannot be dealt out to so many ranks."""
    what = f"eplb_config: num_redundant_experts = {n_redundant}"
    n_slots = n_experts + n_redundant
    if n_slots % n_ranks:
        less = n_redundant - n_slots % n_ranks
        near = f"{less} or {less + n_ranks}" if less >= 0 else str(less + n_ranks)
        raise ConfigError(
            f"{what} and the {n_experts} experts of a layer are {n_slots}, which {n_ranks} ranks cannot share equally:"
            f" give {near}",
            param="eplb_config",
        )
    most = n_experts * (n_ranks - 1)
    if n_redundant > most:
        raise ConfigError(
            f"{what} is more than {most}: with that each of {n_ranks} ranks has all {n_experts} experts already",
            param="eplb_config",
        )


def _refuse(options: Mapping[str, Any]) -> None:
    fields = EplbConfig.__struct_fields__
    for key in options:
        for names, why in REFUSED.items():
            if key in names.split():
                raise _error(f"{key} = {shown(options[key])} means nothing here: {why}", options)
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
            raise _error(f"{key} is unknown: {hint}", options)


def _error(what: str, options: Mapping[str, Any]) -> ConfigError:
    return ConfigError(f"eplb_config = {shown(dict(options))}: {what}", param="eplb_config")
