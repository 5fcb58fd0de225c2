"""`ClusterConfig`: how many replicas of an engine there are, and where. Ray's words where Ray has one.

Owns names, bounds and meaning. Does not own Ray (`engine/replicas/ray.py`). Invariant: after `verify()` what is left
to be wrong only Ray can know.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean

ACTOR_OPTIONS: Final = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector")
"""Of Ray's options of an actor, those that say where it runs."""
AUTOSCALING: Final = (
    "min_replicas", "max_replicas", "initial_replicas", "target_ongoing_requests", "upscale_delay_s",
    "downscale_delay_s", "upscaling_factor", "downscaling_factor", "look_back_period_s", "metrics_interval_s",
)  # fmt: skip
"""Of Ray Serve's AutoscalingConfig, what a model needs."""
DELAYS: Final = ("upscale_delay_s", "downscale_delay_s")
"""Those that may be 0."""


def _doc(text: str, **bounds: float) -> Meta:
    # As in config/engine.py: the stubs of msgspec have no overload for this.
    return Meta(description=text, **bounds)  # type: ignore[call-overload, no-any-return]


class ClusterConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of replicas. Spelling follows Ray Serve."""

    replicas: Annotated[
        int,
        _doc(
            "Engines that serve behind the one address, each with a copy of the model; more than 1 takes"
            " Ray, `pip install 'ray[serve,data]==2.60.*'`.",
            ge=1, le=1024,
        ),
    ] = 1  # fmt: skip
    ray_address: Annotated[
        str,
        _doc(
            "A running Ray cluster that holds the replicas: HOST:PORT of its head, or auto for the one of this machine;"
            " without it a Ray of this machine alone is started, and ended with the server."
        ),
    ] = ""
    ray_actor_options: Annotated[
        dict[str, Any],
        _doc('What Ray sets aside for each replica, as a JSON object. {"num_gpus": 1} Default: one CPU.'),
    ] = {}
    autoscaling_config: Annotated[
        dict[str, Any],
        _doc(
            'Ray Serve\'s, in place of --replicas, as a JSON object. {"min_replicas": 1, "max_replicas": 4,'
            ' "target_ongoing_requests": 64}'
        ),
    ] = {}

    @property
    def is_used(self) -> bool:
        """Whether replicas are wanted at all."""
        return self.replicas > 1 or bool(self.autoscaling_config) or bool(self.ray_address)

    @property
    def n_at_start(self) -> int:
        """Replicas that must find a place before anything is served."""
        if not self.autoscaling_config:
            return self.replicas
        least = self.autoscaling_config.get("min_replicas", 1)
        return max(1, int(self.autoscaling_config.get("initial_replicas", least)))

    def verify(self) -> None:
        """ConfigError naming the option, the value and the limit."""
        try:
            msgspec.convert(msgspec.to_builtins(self), ClusterConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"options of replicas: {error}") from None
        _check_names("ray_actor_options", self.ray_actor_options, ACTOR_OPTIONS)
        _check_names("autoscaling_config", self.autoscaling_config, AUTOSCALING)
        for name in ("num_cpus", "num_gpus", "memory"):
            _check_amount(f"ray_actor_options: {name}", self.ray_actor_options.get(name, 0))
        resources = self.ray_actor_options.get("resources", {})
        if not isinstance(resources, dict):
            raise ConfigError(f'ray_actor_options: resources = {shown(resources)} must be an object {{"NAME": amount}}')
        for name, amount in resources.items():
            _check_amount(f"ray_actor_options: resources: {name}", amount)
        self._check_autoscaling()

    def check_used(self) -> None:
        """ConfigError for options of replicas where there are none."""
        if self.ray_actor_options and not self.is_used:
            raise ConfigError(
                f"ray_actor_options = {shown(self.ray_actor_options)} and replicas = 1: without replicas there is no"
                " Ray: give --replicas, --autoscaling-config or --ray-address too, or leave --ray-actor-options out",
                param="ray_actor_options",
            )

    def _check_autoscaling(self) -> None:
        scaling = self.autoscaling_config
        if not scaling:
            return
        if self.replicas != 1:
            raise ConfigError(f"replicas = {self.replicas} and autoscaling_config are both given: give one of them")
        counts = {name: scaling.get(name, 1) for name in ("min_replicas", "initial_replicas", "max_replicas")}
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"autoscaling_config: {name} = {shown(value)} must be a number from 1 up")
        if "initial_replicas" not in scaling:
            del counts["initial_replicas"]
        if [*counts.values()] != sorted(counts.values()):
            found = ", ".join(f"{name} = {value}" for name, value in counts.items())
            raise ConfigError(f"autoscaling_config: {found}: each must be at least the one before it")
        for name in AUTOSCALING:
            if name in scaling and name not in counts:
                _check_amount(f"autoscaling_config: {name}", scaling[name], is_zero_fine=name in DELAYS)


def _check_names(option: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{option}: {shown(name)} is not one of {', '.join(known)}{did_you_mean(name, known)}"
            )  # fmt: skip


def _check_amount(what: str, amount: object, *, is_zero_fine: bool = True) -> None:
    is_number = isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount < 1 << 62
    if not is_number or not (amount or is_zero_fine):
        raise ConfigError(f"{what} = {shown(amount)} must be a number {'from 0 up' if is_zero_fine else 'above 0'}")
