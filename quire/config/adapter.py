"""adapter_config.json of PEFT: what of an adapter can be applied, and by which factor each of its matrices counts.

Owns the keys and what is refused of them. Does not own tensors (`compute/adapters`).
Keys and formulas: PEFT's `LoraConfig`; Hu et al. 2021 (arXiv 2106.09685, section 4.1); rsLoRA: Kalajdzievski 2023
(arXiv 2312.03732).
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quire.config.fields import is_integer, parse_object
from quire.core.adapters import lora_module
from quire.core.errors import ConfigError, shown

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig

CONFIG: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 4 << 20
MAX_RANK: Final = 256
MAX_PATTERN_CHARS: Final = 512
MAX_PATTERNS: Final = 4096
MAX_REPEATS: Final = 2
"""In a pattern: more, or one behind a group, can keep the search for a match busy for hours."""
_REPEATS: Final = re.compile(r"(?<!\\)[*+{]|(?<!\\)(?<!\()\?")
MERGE: Final = "merge it into its base with peft (merge_and_unload) and load that"

REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA scales the merged matrices, which requests with other adapters share: write a checkpoint that it"
    " is merged into with quire merge MODEL ADAPTER OUTDIR, and load that",
    "modules_to_save": "whole layers that replace the model's are not applied: " + MERGE,
    "trainable_token_indices": "rows of the embedding that replace the model's are not applied: " + MERGE,
    "target_parameters": "experts in one tensor are adapted by engines with --lora-experts: add it, or " + MERGE,
    "layer_replication": "layers that are computed twice are not built: " + MERGE,
    "use_qalora": "its inputs are pooled before the product, which is not built: " + MERGE,
    "lora_bias": "biases of an adapter are not applied: " + MERGE,
    "alora_invocation_tokens": "adapters that begin within a prompt are not built",
    "arrow_config": "routing between adapters is not built",
    "use_bdlora": "matrices in diagonal blocks are not applied: " + MERGE,
    "kasa_config": "KaSA changes the base's weights too: " + MERGE,
    "monteclora_config": "what MonteCLoRA has beside lora_A and lora_B is not applied: " + MERGE,
}
"""Key → why an adapter that sets it is refused."""
MERGEABLE: Final = ("use_dora",)
"""Of those: what can be merged into the checkpoint."""
OF_EXPERTS: Final = ("target_parameters",)
"""And what is of experts."""
CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights that change the base's weights too."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What its matrices are scaled by."""

    rank: int
    alpha: float
    rank_stabilised: bool = False
    """rsLoRA."""
    rank_pattern: Mapping[str, int] = {}
    alpha_pattern: Mapping[str, float] = {}
    targets: tuple[str, ...] | None = None
    """Names, or ends of names, of the modules that it adapts; None: its tensors say which."""
    excludes: bool = False
    """Some of these are left out, which its tensors say too."""
    parameters: tuple[str, ...] = ()
    """Likewise of parameters that are no linear layer: experts in one tensor."""
    base: str = ""
    """Name of the model that it was trained for."""
    is_dora: bool = False

    def rank_of(self, module: str) -> int:
        """Of the matrices of a module, which has the model's own name."""
        found = _matching(self.rank_pattern, module)
        return self.rank if found is None else int(found)

    def scale_of(self, module: str) -> float:
        """What B A x is multiplied by."""
        found = _matching(self.alpha_pattern, module)
        alpha, rank = self.alpha if found is None else found, self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def is_target(self, module: str) -> bool:
        """Whether it says that it adapts the module."""
        if self.targets is None:
            return True
        return any(module == target or module.endswith("." + target) for target in self.targets)


def parse_adapter_config(
    text: bytes, path: pathlib.Path, max_rank: int, *, to_merge: bool = False, with_experts: bool = False
) -> AdapterConfig:
    """What was read from `path`, of PEFT. to_merge: into the checkpoint, not beside it; with_experts: they may be
    adapted. ConfigError for what cannot be applied, naming key, value and limit."""
    values = parse_object(text, path)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"{path}: peft_type = {shown(kind)}; only 'LORA' is applied")
    _check_refused(path, values, (MERGEABLE if to_merge else ()) + (OF_EXPERTS if with_experts else ()))
    parameters = values.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(one, str) for one in parameters):
        raise ConfigError(f"{path}: target_parameters = {shown(parameters)} must be a list of names")
    rank = _rank(path, "r", values.get("r", 8), max_rank)
    targets = values.get("target_modules")
    if isinstance(targets, list) and all(isinstance(one, str) for one in targets):
        targets = tuple(targets)
    elif targets is None or isinstance(targets, str):  # a pattern, or "all-linear", of which the tensors are the result
        targets = None
    else:
        raise ConfigError(f"{path}: target_modules = {shown(targets)} must be a list of names, or a text")
    ranks = _pattern(path, "rank_pattern", values)
    return AdapterConfig(
        rank=rank,
        alpha=_number(path, "lora_alpha", values.get("lora_alpha", 8)),
        rank_stabilised=values.get("use_rslora") is True,
        rank_pattern={key: _rank(path, f"rank_pattern of {shown(key)}", one, max_rank) for key, one in ranks.items()},
        alpha_pattern={
            key: _number(path, f"alpha_pattern of {shown(key)}", one)
            for key, one in _pattern(path, "alpha_pattern", values).items()
        },
        targets=targets,
        excludes=bool(values.get("exclude_modules")),
        parameters=tuple(parameters),
        base=str(values.get("base_model_name_or_path") or ""),
        is_dora=values.get("use_dora") is True,
    )


def _check_refused(path: pathlib.Path, values: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key, because in REFUSED.items():
        if values.get(key) and key not in allowed:
            raise ConfigError(f"{path}: {key} = {shown(values[key])}: {because}")
    if values.get("bias", "none") != "none":
        raise ConfigError(f"{path}: bias = {shown(values['bias'])}: biases of an adapter are not applied: {MERGE}")
    made = values.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(CHANGES_BASE):
        raise ConfigError(
            f"{path}: init_lora_weights = {shown(made)} changes the base's weights too: save the adapter with"
            " path_initial_model_for_weight_conversion, which makes a plain one of it"
        )


def _rank(path: pathlib.Path, key: str, value: Any, max_rank: int) -> int:
    if not is_integer(value) or not 1 <= value <= max_rank:
        hint = ""
        if is_integer(value) and value > max_rank:
            more = f"start with --max-lora-rank {value}"
            hint = f": {more}" if value <= MAX_RANK else f", the most is {MAX_RANK}: {MERGE}"
        raise ConfigError(f"{path}: {key} = {shown(value)} must be an integer between 1 and {max_rank}{hint}")
    return int(value)


def _number(path: pathlib.Path, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e6:
        raise ConfigError(f"{path}: {key} = {shown(value)} must be a number of at most a million")
    return float(value)


def _pattern(path: pathlib.Path, key: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
        raise ConfigError(f"{path}: {key} = {shown(found)} must be an object of at most {MAX_PATTERNS} patterns")
    for pattern in found:
        repeats = list(_REPEATS.finditer(pattern))
        behind_group = any(pattern[: one.start()].endswith(")") for one in repeats)
        if len(pattern) > MAX_PATTERN_CHARS or len(repeats) > MAX_REPEATS or behind_group:
            raise ConfigError(
                f"{path}: {key} has the pattern {shown(pattern)}: it may have {MAX_PATTERN_CHARS} characters and"
                f" {MAX_REPEATS} repetitions, none of a group: write the names out"
            )
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError):
            raise ConfigError(f"{path}: {key} has {shown(pattern)}, which is no regular expression") from None
    return found


def _matching(patterns: Mapping[str, Any], module: str) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT's `get_pattern_key` finds it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return None


def check_adapters(config: EngineConfig) -> None:
    """Options of an engine that serves adapters; raises ConfigError."""
    modules = [lora_module(one) for one in config.lora_modules]
    if modules and not config.enable_lora:
        raise ConfigError("lora_modules needs enable_lora: add --enable-lora", param="lora_modules")
    names = [name for name, _ in modules]
    twice = next((name for name in names if names.count(name) > 1 or name in config.served_model_name), None)
    if twice is not None:
        raise ConfigError(f"lora_modules: the name {shown(twice)} is given twice", param="lora_modules")
    if config.max_cpu_loras and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"max_cpu_loras = {config.max_cpu_loras} is less than max_loras = {config.max_loras}: raise it",
            param="max_cpu_loras",
        )
    if config.enable_lora and (config.is_simulated or config.prefill_context_parallel_size > 1):
        raise ConfigError(
            f"enable_lora works on a real device, where each rank has all tokens of a step: this engine has device ="
            f" {config.device!r} and prefill_context_parallel_size = {config.prefill_context_parallel_size}. Leave"
            " --enable-lora out, and serve weights that quire merge has made",
            param="enable_lora",
        )
    if config.lora_experts and not config.enable_lora:
        raise ConfigError("lora_experts needs enable_lora: add --enable-lora", param="lora_experts")
