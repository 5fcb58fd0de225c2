"""How many KV pages the pool gets: the memory equation with what the device really has, and what to say about it.

Owns the choice of budget. Does not own the equation (`planner/memory`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import msgspec

from quire.config.arch import ModelArch
from quire.config.context import page_tokens
from quire.config.engine import EngineConfig
from quire.config.experts import ExpertsSpec
from quire.config.kv import KVLayout, tokens_in_flight
from quire.config.mesh import depth_of, mesh_of, placed
from quire.config.resolve import EngineLimits
from quire.config.stages import layout_over
from quire.core import env
from quire.core.errors import ConfigError
from quire.core.units import format_bytes, parse_bytes
from quire.planner.formats import kv_number_bytes
from quire.planner.main_memory import main_pool_bytes
from quire.planner.memory import MemoryEquation, Room, n_passing
from quire.planner.parts import EXPERTS, parameters_by_part
from quire.planner.states import SNAPSHOT_SHARE, n_kept_states

logger = logging.getLogger("quire.engine")

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
MIN_TOKENS = 2
"""Of the shortest prompt and the shortest answer together."""
PAGES_OF_NOTHING = 4
"""Times the tokens that all slots hold at most: entries of the prefix tree of a model without keys."""


def equation(
    config: EngineConfig,
    limits: EngineLimits,
    arch: ModelArch,
    weights_bytes: int = 0,
    graph_sizes: tuple[int, ...] = (),
    mixed_rows: int = 0,
    others_bytes: int = 0,
    draft_numbers: int = 0,
    n_snapshots: int = 0,
    kv: KVLayout | None = None,
) -> MemoryEquation:
    """The terms for one engine, or one rank of it. weights_bytes: what its weights take, which some terms do not need;
    graph_sizes: the decode steps that will be captured; mixed_rows: the largest other one; others_bytes: what is not
    this engine's; draft_numbers: what a drafter keeps of a token, see `MemoryEquation`; n_snapshots: recurrent states
    kept; kv: None: `layout_of` arch."""
    chunk, mesh = limits.max_num_batched_tokens, mesh_of(config)
    return MemoryEquation(
        arch=arch,
        page_size=page_tokens(config),
        page_ranks=page_tokens(config) // config.block_size,
        row_ranks=config.prefill_context_parallel_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        weights_bytes=weights_bytes,
        itemsize=ITEMSIZES[limits.dtype],
        kv_itemsize=kv_itemsize(limits, arch),
        graph_sizes=graph_sizes,
        mixed_rows=mixed_rows,
        kv=layout_of(config, limits, arch) if kv is None else kv,
        in_flight=tokens_in_flight(depth_of(config), limits.max_drafts),
        prompt_in_flight=depth_of(config) * min(chunk, config.long_prefill_token_threshold or chunk),
        exchanged_rows=mesh.dp * chunk if mesh.sends_rows else 0,
        others_bytes=others_bytes,
        max_sampled=limits.max_sampled,
        draft_numbers=draft_numbers,
        n_snapshots=n_snapshots,
        n_passing=n_passing(config.pipeline_depth, config.pipeline_parallel_size),
        adapters=limits.adapters,
        widens_keys=limits.kv_dtype == "fp8" and limits.on_hopper and not config.deterministic,
        on_gpu=limits.on_gpu,
        sum_ranks=mesh.n_sum_ranks if limits.on_hopper and env.read("QUIRE_PEER_MEMORY") != "0" else 0,
    )


def whole_bytes(config: EngineConfig, arch: ModelArch, held_bytes: int) -> int:
    """Of a model's weights, each counted once, where a rank holds held_bytes: of stages, a rank of each together.
    Ranks share what is no expert within a data-parallel rank, and experts, with their copies, may be shared by all."""
    mesh, parts = mesh_of(config), parameters_by_part(arch)
    n_experts = sum(number for part, number in parts.items() if part.startswith(EXPERTS))
    n_others, copies = sum(parts.values()) - n_experts, 1.0
    for layer in placed(arch, config).layers:
        if isinstance(layer.ffn, ExpertsSpec):
            copies = layer.ffn.n_slots / layer.ffn.n_experts
    n_held = n_others / mesh.tp + n_experts * copies / max(mesh.ep, mesh.tp)
    return round(held_bytes * (n_others + n_experts) / n_held)


def layout_of(config: EngineConfig, limits: EngineLimits, arch: ModelArch) -> KVLayout:
    """The groups of layers with page tables of their own, of a model that may be divided within its layers. limits: as
    they were asked for, before the pool was sized."""
    hybrid = not config.disable_hybrid_kv_cache_manager
    return layout_over(arch, limits.max_model_len, config.pipeline_parallel_size, hybrid=hybrid)


def kv_itemsize(limits: EngineLimits, arch: ModelArch) -> float:
    """Bytes a number in the KV cache, scales counted in."""
    return kv_number_bytes(limits.kv_dtype, arch.head_dim)


def snapshots_within(config: EngineConfig, limits: EngineLimits, pools: Sequence[StagePool]) -> int:
    """How many recurrent states are kept for later sequences, which is logged: as many on each stage as on the one with
    room for the fewest. pools: of stages, with the weights loaded."""
    of_stages = [equation(config, limits, pool.arch).state_bytes for pool in pools]
    state_bytes = max(of_stages)
    if not state_bytes or not config.enable_prefix_caching:
        return 0
    n = min(_n_snapshots(config, limits, pool) for pool, n_bytes in zip(pools, of_stages, strict=True) if n_bytes)
    if not n:
        logger.warning(
            "a recurrent state takes %s, more than %d %% of the free memory: none is kept, so prompts are never found "
            "in the cache", format_bytes(state_bytes), round(SNAPSHOT_SHARE * 100),
        )  # fmt: skip
    else:
        logger.info(
            "recurrent states: %s a sequence, %d of them kept for prompts that begin alike",
            format_bytes(state_bytes), n,
        )  # fmt: skip
    return n


def _n_snapshots(config: EngineConfig, limits: EngineLimits, stage: StagePool) -> int:
    """As `n_kept_states`; none where no prefix is looked for."""
    if not config.enable_prefix_caching:
        return 0
    state_bytes = equation(config, limits, stage.arch).state_bytes
    return n_kept_states(stage.room.free_bytes, state_bytes, limits.max_num_seqs)


def tokens_held(
    config: EngineConfig, limits: EngineLimits, stage: StagePool, graph_sizes: tuple[int, ...] = ()
) -> int:
    """Of the longest sequence that `size_pool` would find room for; 0: it would raise."""
    room, n_snapshots = stage.room, _n_snapshots(config, limits, stage)
    terms = _measured(
        equation(
            config, limits, stage.arch, stage.weights_bytes, graph_sizes, n_snapshots=n_snapshots, kv=stage.kv
        ), room, stage.others_bytes,
    )  # fmt: skip
    n_pages = config.num_gpu_blocks_override
    n_pages = n_pages or (_budget(config, terms, room) - terms.fixed_bytes) // terms.page_bytes
    n_bytes = terms.total_bytes(n_pages)
    fits = n_bytes <= room.total_bytes and (not room.is_main or n_bytes - terms.weights_bytes <= room.free_bytes)
    return terms.tokens_within(n_pages - 1) if fits and n_pages >= terms.min_pages else 0


@dataclasses.dataclass(frozen=True, slots=True)
class StagePool:
    """What decides how many pages the ranks of one stage can have."""

    arch: ModelArch
    """What one of them computes."""
    kv: KVLayout
    """All groups, with its layers."""
    weights_bytes: int
    others_bytes: int
    room: Room


def tightest(
    config: EngineConfig,
    limits: EngineLimits,
    stages: Sequence[StagePool],
    graph_sizes: tuple[int, ...],
    n_snapshots: int = 0,
) -> StagePool:
    """The one with the fewest: all ranks have as many pages as it has. n_snapshots: see `equation`."""

    def n_pages(stage: StagePool) -> int:
        terms = _measured(
            equation(
                config, limits, stage.arch, stage.weights_bytes, graph_sizes, n_snapshots=n_snapshots, kv=stage.kv
            ), stage.room, stage.others_bytes,
        )  # fmt: skip
        return (_budget(config, terms, stage.room) - terms.fixed_bytes) // terms.page_bytes

    return min(stages, key=n_pages)


def _measured(terms: MemoryEquation, room: Room, others_bytes: int) -> MemoryEquation:
    """With all that is in use on a device as weights, where that is more: without others_bytes, which were before this
    engine took anything, and what ranks share, which has a term of its own."""
    if room.is_main:
        return terms
    used_bytes = room.used_bytes - others_bytes - terms.peers_bytes
    return dataclasses.replace(terms, weights_bytes=max(terms.weights_bytes, used_bytes))


def size_pool(
    config: EngineConfig,
    limits: EngineLimits,
    arch: ModelArch,
    room: Room,
    graph_sizes: tuple[int, ...] = (),
    mixed_rows: int = 0,
    weights_bytes: int = 0,
    others_bytes: int = 0,
    draft_numbers: int = 0,
    n_snapshots: int = 0,
    kv: KVLayout | None = None,
) -> tuple[int, EngineLimits]:
    """Number of pages (dummy included), and the limits, with a max_model_len that the pool can hold.

    room: with the weights loaded. weights_bytes: what they take; others_bytes: see `_measured`. kv: as `equation`.
    Raises ConfigError with every term when less than a page a group, or less than an explicit max_model_len, fit.
    """
    terms = equation(
        config, limits, arch, weights_bytes, graph_sizes, mixed_rows, others_bytes, draft_numbers, n_snapshots, kv
    )
    terms = _measured(terms, room, others_bytes)
    budget_bytes = _budget(config, terms, room)
    n_pages = config.num_gpu_blocks_override or terms.pages_within(budget_bytes)
    if not terms.layout.numbers and not config.num_gpu_blocks_override:  # they hold nothing: as many as are of use
        n_pages = min(n_pages, 1 + PAGES_OF_NOTHING * terms.max_num_seqs * terms.seq_pages(terms.max_model_len))
    if n_pages * terms.page_bytes + terms.fixed_bytes > room.total_bytes:
        raise ConfigError(
            f"{n_pages} KV pages do not fit into {format_bytes(room.total_bytes)}:\n{terms.explain(room.total_bytes)}"
        )
    n_tokens = terms.tokens_within(n_pages - 1)
    _check_shortest(config, limits, terms, n_pages, n_tokens)
    if n_tokens < limits.max_model_len:
        if config.max_model_len and config.num_gpu_blocks_override:
            raise ConfigError(
                f"--num-gpu-blocks-override {n_pages}: so many pages of {terms.page_size} tokens, one of them a "
                f"dummy, hold sequences of {n_tokens} tokens, and --max-model-len is {config.max_model_len}: raise the "
                f"former to at least {1 + terms.seq_pages(config.max_model_len)} or leave it out, or lower the latter",
                param="num_gpu_blocks_override",
            )
        if config.max_model_len:
            raise ConfigError(
                f"max_model_len = {config.max_model_len} tokens do not fit the KV pool of {n_tokens} tokens:\n"
                f"{terms.explain(budget_bytes)}"
            )
        logger.warning(
            "the KV pool holds %d tokens, so max_model_len is lowered from %d to that", n_tokens, limits.max_model_len
        )
        limits = msgspec.structs.replace(limits, max_model_len=n_tokens)
    n_prompt = dataclasses.replace(terms, max_model_len=limits.max_model_len).prompt_within(n_pages - 1)
    if n_prompt < terms.prompt_in_flight:
        logger.warning(
            "towards its end a prompt of %d tokens is computed in steps of about %d tokens, not %d: the KV pool of "
            "%d pages has no room for more; a larger pool makes it faster",
            limits.max_model_len, n_prompt // depth_of(config), terms.prompt_in_flight // depth_of(config), n_pages,
        )  # fmt: skip
    logger.info(
        "KV pool: %d pages of %d tokens in %s, %s",
        n_pages, terms.page_size, limits.kv_dtype, format_bytes(n_pages * terms.page_bytes),
    )  # fmt: skip
    return n_pages, limits


def _check_shortest(
    config: EngineConfig, limits: EngineLimits, terms: MemoryEquation, n_pages: int, n_tokens: int
) -> None:
    """ConfigError if not even the shortest prompt and answer fit."""
    n_fitting = max(0, min(n_tokens, limits.max_model_len))
    if n_fitting >= MIN_TOKENS:
        return
    n_groups, cure = len(terms.layout.groups), "raise max_model_len"
    if limits.max_model_len >= MIN_TOKENS:
        cure = f"raise --num-gpu-blocks-override to at least {1 + terms.seq_pages(MIN_TOKENS)}, or leave it out"
    shares = ""
    if n_groups > 1:
        shares = f", a sequence takes one in each of the {n_groups} groups of layers,"
        if limits.max_model_len >= MIN_TOKENS:
            cure += ", or give --disable-hybrid-kv-cache-manager"
    raise ConfigError(
        f"{n_pages} KV pages of {terms.page_size} tokens, one of them a dummy{shares or ','} and a max_model_len of "
        f"{limits.max_model_len} leave room for {n_fitting} tokens, and a prompt and its answer have at least "
        f"{MIN_TOKENS}: {cure}"
    )


def _budget(config: EngineConfig, terms: MemoryEquation, room: Room) -> int:
    """Bytes for the whole engine."""
    if config.kv_cache_memory_bytes:
        return terms.fixed_bytes + parse_bytes(config.kv_cache_memory_bytes)
    if room.is_main:
        free_bytes = max(min(room.free_bytes, room.address_bytes) - terms.kept_adapters_bytes, 0)
        is_length_asked = bool(config.max_model_len)
        return terms.fixed_bytes + main_pool_bytes(terms, free_bytes, is_length_asked=is_length_asked)
    return int(room.total_bytes * config.gpu_memory_utilization)
