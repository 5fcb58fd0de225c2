"""Whether a model fits, before a byte of its weights is read: from headers and shapes, against what is free.

Owns the comparison, the table that a refusal shows, and which options would help. Does not own the terms
(`planner/memory`), the weights' sizes (`compute/weights/footprint`) or the pool (`engine/capacity`).
Invariants: nothing is refused that could be loaded; each proposed option was tried in the same comparison, and is one
that this device takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec

from quire.compute.weights.hub import called
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import NOT_ROUNDED, EngineLimits
from quire.core.errors import ConfigError
from quire.core.failure import Code
from quire.core.units import format_bytes, parse_bytes
from quire.engine.capacity import ITEMSIZES, equation, kv_itemsize
from quire.planner.memory import MemoryEquation, Room

MOST_UTILIZATION: Final = 0.97
"""Largest `--gpu-memory-utilization` that is proposed: the driver and other programs need the rest."""
FEWER: Final = (512, 256, 64, 16, 4)
"""Values of --max-num-seqs that are proposed."""
SHORTEST: Final = 256
"""Tokens; a shorter context is not proposed."""
ROUNDED: Final = ("int8", "int4")
"""Values of --quantization that are proposed, the more exact first."""
MIB: Final = 1 << 20


class Sizes(Protocol):
    """Bytes of weights, as `weights.footprint.Footprint`."""

    @property
    def held_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def address_bytes(self) -> int: ...


class SizesOf(Protocol):
    """Bytes of all weights in a dtype and under a value of --quantization."""

    def __call__(self, dtype: str, quantization: str) -> Sizes: ...


@dataclasses.dataclass(frozen=True, slots=True)
class FitCase:
    """One set of options, to be compared with the room."""

    config: EngineConfig
    limits: EngineLimits
    arch: ModelArch
    room: Room
    sizes_of: SizesOf
    graph_sizes: tuple[int, ...] = ()
    mixed_rows: int = 0
    """As in `MemoryEquation`."""
    rounds: bool = False
    """Whether weights can be rounded here, and products of them are fast."""
    kv_rounded: str = ""
    """The `kv_cache_dtype` to which the cache can be; empty: it cannot."""
    draft_numbers: Callable[[float, float], int] | None = None
    """What a drafter keeps of a token, by the bytes of the model's numbers and of those in the cache."""

    def change(self, **options: object) -> FitCase:
        """The same with other options."""
        config = msgspec.structs.replace(self.config, **options)
        known = {name: value for name, value in options.items() if name in EngineLimits.__struct_fields__}
        if "kv_cache_dtype" in options:
            known["kv_dtype"] = options["kv_cache_dtype"]
        elif "dtype" in options and self.limits.kv_dtype == self.limits.dtype:
            known["kv_dtype"] = options["dtype"]
        limits = msgspec.structs.replace(self.limits, **known)
        sizes = tuple(size for size in self.graph_sizes if size <= limits.max_num_seqs)
        return dataclasses.replace(self, config=config, limits=limits, graph_sizes=sizes)

    def terms(self, graph_sizes: tuple[int, ...] = (), mixed_rows: int = 0) -> MemoryEquation:
        """Without the weights."""
        n_numbers = 0
        if self.draft_numbers is not None:
            n_numbers = self.draft_numbers(ITEMSIZES[self.limits.dtype], kv_itemsize(self.limits, self.arch))
        return equation(self.config, self.limits, self.arch, 0, graph_sizes, mixed_rows, draft_numbers=n_numbers)

    @property
    def sizes(self) -> Sizes:
        """Of the weights."""
        return self.sizes_of(self.limits.dtype, self.config.quantization)

    @property
    def page_bytes(self) -> int:
        """Of one page in all of its lanes."""
        return self.terms().page_bytes

    @property
    def working_bytes(self) -> int:
        """Activations, adapters' too, logits and tables of the largest step, what captured ones keep, recurrent states,
        and what GPUs share for sums."""
        terms = self.terms(self.graph_sizes, self.mixed_rows)
        own_bytes = terms.workspace_bytes + terms.logits_bytes + terms.tables_bytes + terms.graphs_bytes
        return own_bytes + terms.states_bytes + terms.adapters_bytes + terms.peers_bytes

    @property
    def kv_bytes(self) -> int:
        """The pool that was asked for, else one sequence of the length that was asked for, else the fewest pages."""
        if self.config.num_gpu_blocks_override:
            return self.config.num_gpu_blocks_override * self.page_bytes
        if self.config.kv_cache_memory_bytes:
            return parse_bytes(self.config.kv_cache_memory_bytes)
        terms = self.terms()
        n_pages = 1 + terms.seq_pages(self.config.max_model_len) if self.config.max_model_len else terms.min_pages
        return n_pages * terms.page_bytes

    @property
    def has_pool(self) -> bool:
        """Whether the size of the pool was given."""
        return bool(self.config.num_gpu_blocks_override or self.config.kv_cache_memory_bytes)

    @property
    def needed_bytes(self) -> int:
        """The most at once: at the end of loading, or when the engine runs."""
        return max(self.sizes.peak_bytes, self.sizes.held_bytes + self.working_bytes + self.kv_bytes)

    @property
    def available_bytes(self) -> int:
        """For this engine; on a GPU within its share of the whole."""
        if self.room.is_main:
            return self.room.free_bytes + self.room.swap_bytes
        share = 1.0 if self.has_pool else self.config.gpu_memory_utilization
        return int(self.room.total_bytes * share) - self.room.used_bytes

    @property
    def fits_address_space(self) -> bool:
        """Whether the matrices can be mapped under `ulimit -v`; the pool is mapped when they are smaller."""
        return max(self.sizes.address_bytes, self.needed_bytes) <= self.room.address_bytes

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against loading."""
        return self.needed_bytes <= self.available_bytes and self.fits_address_space


def check_fit(case: FitCase) -> None:
    """Raises ConfigError with the table, one term a line, and what would fit."""
    if case.arch.state_specs and not case.config.max_num_seqs:
        case = case.change(max_num_seqs=1)  # as many run at once as fit, see `concurrency`
    if case.room.total_bytes <= 0 or case.fits:
        return
    raise ConfigError("\n".join([*_table(case), *_cures(case)]), code=Code.DOES_NOT_FIT)


def _table(case: FitCase) -> list[str]:
    sizes, config, terms = case.sizes, case.config, case.terms()
    scheme = case.limits.dtype if config.quantization in NOT_ROUNDED else config.quantization
    if n_copies := config.eplb_config.get("num_redundant_experts", 0):
        scheme += f"; a part of {n_copies} copies of experts in each layer: fewer num_redundant_experts take less"
    if config.num_gpu_blocks_override or config.kv_cache_memory_bytes:
        kv, what = "KV pool", "as asked"
    elif config.max_model_len:
        kv, what = "KV, one sequence", f"{config.max_model_len} tokens in {case.limits.kv_dtype}"
    else:
        kv, what = "KV, at least", f"{terms.min_pages} pages in {case.limits.kv_dtype}"
    limits = case.limits
    step = f"steps of {limits.max_num_batched_tokens} tokens, {limits.max_num_seqs} sequences"
    rows = [("weights", sizes.held_bytes, scheme), (kv, case.kv_bytes, what), ("activations", case.working_bytes, step)]
    total = sum(n_bytes for _, n_bytes, _ in rows)
    by_space = case.needed_bytes <= case.available_bytes
    needed = max(sizes.address_bytes, case.needed_bytes) if by_space else case.needed_bytes
    rows.append(("sum", total, ""))
    if needed > total:
        reason = "a matrix is there twice while it is laid out"
        rows.append(("while loading", needed, "all matrices are mapped first" if by_space else reason))
    rows += _spaces(case) if by_space else _available(case)
    lacking = needed - (case.room.address_bytes if by_space else case.available_bytes)
    lines = [f"{called(config.model)} does not fit: {format_bytes(max(lacking, 1))} are lacking"]
    for name, n_bytes, note in rows:
        lines.append(f"  {name:<17}{format_bytes(n_bytes):>11}{f'  ({note})' if note else ''}")
    return lines


Row = tuple[str, int, str]


def _spaces(case: FitCase) -> list[Row]:
    return [("available", case.room.address_bytes, "address space left under the limit on it, ulimit -v")]


def _available(case: FitCase) -> list[Row]:
    room = case.room
    if case.room.is_main:
        swap = f", swap of {format_bytes(room.swap_bytes)} counted in" if room.swap_bytes else ""
        others = max(0, room.used_bytes - room.own_bytes)
        held = f"this process {format_bytes(room.own_bytes)}, the rest of the machine {format_bytes(others)}"
        note = f"of {format_bytes(room.total_bytes)}{swap}"
    else:
        share = "" if case.has_pool else f", --gpu-memory-utilization {case.config.gpu_memory_utilization:g}"
        note = f"of {format_bytes(room.total_bytes)}{share}"
        held = "other programs, other engines of this process, the CUDA context"
    return [("available", max(0, case.available_bytes), note), ("held by others", room.used_bytes, held)]


def _cures(case: FitCase) -> list[str]:
    found = [f"  {flag}{f'  ({note})' if note else ''}" for flag, note in _that_fit(case)]
    if found:
        return ["what would fit, each alone:", *found]
    smallest = min([case, *_smaller(case)], key=lambda one: one.needed_bytes)
    option = "" if smallest is case else f" with --quantization {smallest.config.quantization}"
    return [
        f"no option alone would be enough: take a smaller model, or a device with {format_bytes(smallest.needed_bytes)}"
        f" free{option}"
    ]


def _smaller(case: FitCase) -> Iterator[FitCase]:
    """Schemes that this device takes and that make the weights smaller."""
    if case.rounds:
        for name in ROUNDED:
            changed = case.change(quantization=name)
            try:
                is_smaller = changed.sizes.held_bytes < case.sizes.held_bytes
            except ConfigError:  # ranks cannot share it
                continue
            if is_smaller:
                yield changed


def _that_fit(case: FitCase) -> Iterator[tuple[str, str]]:
    """(flag with its value, note)."""
    config, limits = case.config, case.limits
    for changed in _smaller(case):
        if changed.fits:
            name = changed.config.quantization
            yield f"--quantization {name}", f"weights of {format_bytes(changed.sizes.held_bytes)}"
    if limits.dtype == "float32" and case.change(dtype="bfloat16").fits:
        yield "--dtype bfloat16", f"weights of {format_bytes(case.change(dtype='bfloat16').sizes.held_bytes)}"
    rounded = case.kv_rounded
    if rounded not in ("", limits.kv_dtype) and case.change(kv_cache_dtype=rounded).fits:
        yield f"--kv-cache-dtype {rounded}", ""
    yield from _smaller_pool(case)
    for n_seqs in FEWER:
        if n_seqs < limits.max_num_seqs and case.change(max_num_seqs=n_seqs).fits:
            yield f"--max-num-seqs {n_seqs}", ""
            break
    if not case.room.is_main and not case.has_pool:
        needed = (case.needed_bytes + case.room.used_bytes) / case.room.total_bytes
        share = math.ceil(needed * 100) / 100
        if config.gpu_memory_utilization < share <= MOST_UTILIZATION:
            yield f"--gpu-memory-utilization {share:g}", "if nothing else needs that memory"


def _smaller_pool(case: FitCase) -> Iterator[tuple[str, str]]:
    """Less room for keys and values: a smaller pool where one was asked for, else a shorter context."""
    space = min(case.available_bytes, case.room.address_bytes) - case.sizes.held_bytes - case.working_bytes
    n_pages = space // case.page_bytes
    terms = case.terms()
    if n_pages < terms.min_pages:
        return
    if case.config.num_gpu_blocks_override:
        if case.change(num_gpu_blocks_override=n_pages).fits:
            yield f"--num-gpu-blocks-override {n_pages}", ""
    elif case.config.kv_cache_memory_bytes:
        size = f"{space // MIB}MiB"
        if space >= MIB and case.change(kv_cache_memory_bytes=size).fits:
            yield f"--kv-cache-memory-bytes {size}", ""
    elif case.config.max_model_len:
        n_tokens = terms.tokens_within(n_pages - 1)
        if SHORTEST <= n_tokens < case.config.max_model_len and case.change(max_model_len=n_tokens).fits:
            yield f"--max-model-len {n_tokens}", ""
