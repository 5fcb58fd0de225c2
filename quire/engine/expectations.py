"""What the planner's model expects of an engine, for those who ask why a request took so long.

Owns whether anything can be said of this device at all, and the words. Does not own the sums (`planner/expectation`).
Computed when somebody asks, in the client's process: the engine notes only what its steps were.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, Final

from quire.config.engine import EngineConfig
from quire.config.eplb import balanced
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.core.events import Explanation
from quire.engine.frontend import Frontend
from quire.planner.accelerators import accelerator_seen, host_accelerator
from quire.planner.calibration import Calibration, calibration_of, load_calibration
from quire.planner.cost import CostModel
from quire.planner.engine_cost import engine_cost
from quire.planner.error_bar import error_bar
from quire.planner.expectation import ALONE, PROMPTS, QUEUE, SEQUENCES, Expected, first_token, later_token
from quire.planner.expert_loads import ExpertLoads
from quire.planner.parts import EVEN_LOADS

UNKNOWN: Final = "What it should have taken is not known: "
MEASURE: Final = "`quire bench calibrate` measures them, and `quire serve --calibration FILE` takes its file"
SAID: Final = {
    QUEUE: "the steps that it waited for", ALONE: "alone", SEQUENCES: "other sequences beside it",
    PROMPTS: "other work in its steps",
}  # fmt: skip
SAID_LATER: Final = {**SAID, PROMPTS: "prompts of others"}


class Expectations:
    """Of the engine of one frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._given: Calibration | None = None
        self._found: CostModel | str | None = None
        """Of a step, or why nothing is known of it; None: nobody has asked yet."""
        self._loads = EVEN_LOADS
        """Of experts, for which it was found."""

    def calibrate(self, path: pathlib.Path) -> None:
        """Take the file that the operator has named in place of what comes with Quire. ConfigError for a bad one."""
        self._given, self._found = load_calibration(path), None

    def of(self, one: Explanation, expert_map: Sequence[bytes] = ()) -> dict[str, Any]:
        """As it is answered: `unknown` says why there are no figures, and is null where there are. expert_map: see
        `EngineStats`; as often steps are taken to choose each expert."""
        loads = _loads(self._frontend.config, expert_map)
        if self._found is None or loads != self._loads:
            self._loads = loads
            try:
                self._found = _cost(self._frontend, self._given, loads)
            except ConfigError as error:
                self._found = error.message
        if isinstance(self._found, str):
            return {"unknown": self._found, "words": [f"{UNKNOWN}{self._found}."]}
        first, later, timer = first_token(self._found, one), later_token(self._found, one), self._found.timer
        margin, words = error_bar(timer), []
        if first is not None:
            words.append(_sentence("The first token", first, margin, SAID))
        if later is not None:
            words.append(_sentence("Each later token", later, margin, SAID_LATER))
        return {
            "unknown": None, "device": timer.calibration.device, "source": timer.calibration.source, "error": margin,
            "first_token": _figures(first), "later_token": _figures(later), "words": words,
        }  # fmt: skip


def _loads(config: EngineConfig, expert_map: Sequence[bytes]) -> ExpertLoads:
    """An even choice where nothing was counted yet."""
    layers = tuple(tuple(map(float, layer)) for layer in expert_map if any(layer))
    if not layers:
        return EVEN_LOADS
    eplb = balanced(config)
    n_redundant = None if eplb is None else eplb.num_redundant_experts
    return ExpertLoads(words="counted", layers=layers, n_redundant=n_redundant)


def _cost(frontend: Frontend, given: Calibration | None, loads: ExpertLoads) -> CostModel:
    """ConfigError that says in a few words why nothing is known."""
    ready, config = frontend.ready, frontend.config
    if frontend.arch is None or ready.device not in ("cuda", "cpu"):
        raise ConfigError(f"the device '{ready.device}' has no steps of its own")
    if config.speculative_config:
        raise ConfigError("the model of time knows no drafts")
    if config.data_parallel_size > 1:
        raise ConfigError("the model of time knows no sequences that other data-parallel ranks have")
    device = accelerator_seen(ready.device_name) if ready.device == "cuda" else None
    name = "this CPU" if ready.device == "cpu" else ready.device_name
    calibration = given or (calibration_of(device.name) if device else None)
    if calibration is None or calibration.is_assumed:
        raise ConfigError(f"steps were never timed on {name}; {MEASURE}")
    if given is not None and (given.device == "cpu") != (ready.device == "cpu"):
        raise ConfigError(f"the calibration is of {given.device}, and the engine runs on {name}")
    limits = resolve(config, frontend.arch, ready.device, is_server=True)
    return engine_cost(frontend.arch, config, limits, device or host_accelerator(calibration), calibration, loads)


def _sentence(what: str, one: Expected, error: float, said: dict[str, str]) -> str:
    """What took the most comes first."""
    parts = sorted(one.parts_s.items(), key=lambda part: -part[1])
    reasons = ", ".join(f"{said[name]} {_ms(seconds)}" for name, seconds in parts if seconds > 0.01 * one.expected_s)
    text = f"{what} took {_ms(one.took_s)}; {_ms(one.expected_s)} were expected (± {100 * error:.0f} %): {reasons}"
    if abs(one.rest_s) <= error * one.expected_s:
        return f"{text}."
    more = "more have no reason in this model" if one.rest_s > 0 else "less than that"
    return f"{text}; {_ms(abs(one.rest_s))} {more}."


def _figures(one: Expected | None) -> dict[str, Any] | None:
    if one is None:
        return None
    parts = {f"{name}_s": seconds for name, seconds in one.parts_s.items()}
    return {
        "n_tokens": one.n_tokens, "took_s": one.took_s, "expected_s": one.expected_s, **parts, "rest_s": one.rest_s,
    }  # fmt: skip


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"
