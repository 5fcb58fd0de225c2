"""Ranks that share the tokens of a step: how they attend, what each keeps of keys and values, what they cannot.

Owns the choice and its refusals. Does not own how many ranks there are in all (`mesh`), nor what they say to one
another (`compute/runner/ulysses`, `compute/runner/ring`). Torch-free.
Invariant: behind `settled` the method is no longer 'auto'.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.config.engine import EngineConfig
from quire.config.layers import MixerSpec
from quire.config.speculative import read_speculative
from quire.core.errors import ConfigError, shown

SIZE, METHOD = "prefill_context_parallel_size", "context_parallel_method"
ULYSSES: Final = "ulysses"
RING: Final = "ring"


def settled(config: EngineConfig, arch: ModelArch) -> EngineConfig:
    """With a method that the model can have, and a degree. Raises ConfigError where it has none."""
    n_ranks, degree = config.prefill_context_parallel_size, config.ulysses_degree
    if n_ranks == 1:
        check_meant(config)
        return config
    _check(config, arch)
    reasons = {ULYSSES: _against_ulysses(arch, n_ranks), RING: _against_ring(config, arch)}
    method: Literal["auto", "ulysses", "ring"] = config.context_parallel_method
    if method == "auto":
        degree = degree or _most_heads(arch, n_ranks)
        method = ULYSSES if not reasons[ULYSSES] and (degree == n_ranks or reasons[RING]) else RING
    if reasons[method]:
        other = RING if method == ULYSSES else ULYSSES
        instead = "take fewer ranks, or --tensor-parallel-size" if reasons[other] else f"take {other}"
        raise ConfigError(
            f"{SIZE} = {n_ranks} with {METHOD} = {config.context_parallel_method!r}: {reasons[method]}; {instead}",
            param=METHOD,
        )
    degree = n_ranks if method == ULYSSES else degree or 1
    _check_degree(arch, n_ranks, degree)
    return msgspec.structs.replace(config, context_parallel_method=method, ulysses_degree=degree)


def deals_tokens(config: EngineConfig) -> bool:
    """Whether ranks take the tokens of sequences in turn. The method is settled."""
    return config.prefill_context_parallel_size > 1 and config.context_parallel_method == RING


def n_turns(config: EngineConfig) -> int:
    """Ranks that take tokens in turn; beside each are others of the same tokens, where there is a degree. The method is
    settled."""
    return config.prefill_context_parallel_size // max(1, config.ulysses_degree) if deals_tokens(config) else 1


def n_dividing_heads(config: EngineConfig) -> int:
    """Ranks that divide the heads of the same tokens. The method is settled."""
    return config.prefill_context_parallel_size // n_turns(config)


def page_tokens(config: EngineConfig) -> int:
    """Tokens of a page, as sequences have them: of a ring each rank has `block_size` of them. The method is settled."""
    return config.block_size * n_turns(config)


def attending(arch: ModelArch, config: EngineConfig, rank: int) -> ModelArch:
    """The model as one rank attends: with its heads, where these are divided. The method is settled."""
    n_ranks = n_dividing_heads(config)
    return arch if n_ranks == 1 else with_own_heads(arch, rank % n_ranks, n_ranks)


def with_own_heads(arch: ModelArch, rank: int, n_ranks: int) -> ModelArch:
    """The model with the heads of one rank."""
    layers = [msgspec.structs.replace(layer, mixer=own_heads(layer.mixer, rank, n_ranks)) for layer in arch.layers]
    return msgspec.structs.replace(arch, layers=tuple(layers))


def own_heads(mixer: MixerSpec, rank: int, n_ranks: int) -> AttentionSpec:
    """The heads of one rank. Norms are of rows that have all heads: none is left."""
    assert isinstance(mixer, AttentionSpec)
    return msgspec.structs.replace(mixer, qk_norm=None).share(rank, n_ranks)


def check_meant(config: EngineConfig) -> None:
    """ConfigError where it is said how ranks share tokens, and none do."""
    for name, usual in ((METHOD, "auto"), ("ulysses_degree", 0)):
        if config.prefill_context_parallel_size == 1 and getattr(config, name) != usual:
            raise ConfigError(
                f"{name} = {shown(getattr(config, name))} and {SIZE} = 1: there are no ranks that share tokens: give"
                f" --prefill-context-parallel-size 2 or more, or leave {name} out",
                param=name,
            )


def check_alone(config: EngineConfig) -> None:
    """ConfigError where ranks are to share tokens and something else."""
    n_ranks = config.prefill_context_parallel_size
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if n_ranks > 1 and getattr(config, name) > 1:
            raise ConfigError(
                f"{SIZE} = {n_ranks} and {name} = {getattr(config, name)}: ranks that divide tokens have all weights"
                " and the same sequences, and divide nothing else yet; leave one of both out",
                param=SIZE,
            )


def _check(config: EngineConfig, arch: ModelArch) -> None:
    """Whatever the method is."""
    what, n_ranks = f"{SIZE} = {config.prefill_context_parallel_size}", config.prefill_context_parallel_size
    check_alone(config)
    if config.enable_expert_parallel:
        raise ConfigError(
            f"{what} and enable_expert_parallel: each of these ranks has all experts, and computes those of its own"
            " tokens; leave --enable-expert-parallel out",
            param="enable_expert_parallel",
        )
    if arch.state_specs:
        raise ConfigError(
            f"{what}: {arch.family} has recurrent layers, whose tokens follow each other and cannot be divided; leave"
            " it out, or take --tensor-parallel-size",
            param=SIZE,
        )
    if n_ranks > config.max_num_batched_tokens > 0:
        raise ConfigError(
            f"{what} exceeds max_num_batched_tokens = {config.max_num_batched_tokens}: a step has fewer tokens than"
            " ranks; lower the former or raise the latter",
            param=SIZE,
        )


def _mixers(arch: ModelArch) -> list[MixerSpec]:
    return list(dict.fromkeys(layer.mixer for layer in arch.layers))


def _most_heads(arch: ModelArch, n_ranks: int) -> int:
    """Ranks that can have KV heads of their own, of as many as divide n_ranks."""
    degree = n_ranks
    for mixer in _mixers(arch):
        n_kv_heads = mixer.kv_spec.n_kv_heads if isinstance(mixer, AttentionSpec) else 1
        degree = math.gcd(degree, n_kv_heads)
    return degree


def _check_degree(arch: ModelArch, n_ranks: int, degree: int) -> None:
    if n_ranks % degree:
        raise ConfigError(
            f"ulysses_degree = {degree} does not divide {SIZE} = {n_ranks}: each place of the ring has as many ranks;"
            " take a divisor, or leave --ulysses-degree out",
            param="ulysses_degree",
        )
    reason = "" if degree == 1 else _against_ulysses(arch, degree)
    if reason:
        raise ConfigError(f"ulysses_degree = {degree}: {reason}; leave --ulysses-degree out", param="ulysses_degree")


def _against_ulysses(arch: ModelArch, n_ranks: int) -> str:
    for mixer in _mixers(arch):
        if not isinstance(mixer, AttentionSpec):
            return "its heads read one line a token, which cannot be divided by heads"
        try:
            own_heads(mixer, 0, n_ranks)
        except ConfigError as error:
            return error.message
    return ""


def _against_ring(config: EngineConfig, arch: ModelArch) -> str:
    for mixer in _mixers(arch):
        if isinstance(mixer, AttentionSpec) and mixer.alibi:
            return "its logits fall with distance (ALiBi), which parts of a sequence do not know"
        if isinstance(mixer, AttentionSpec) and mixer.sinks:
            return "its heads have sinks, which parts of a sequence would count several times"
    speculative = read_speculative(config.speculative_config)
    if speculative is not None and speculative.tree is not None:
        return "trees of drafts have masks that parts of a sequence do not know (leave \"branching\" out)"
    return ""
