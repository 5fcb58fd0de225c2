"""`SchedulerConfig`: the limits within which control decides. Owns bounds, not origins (`config/resolve`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from quire.config.kv import PLAIN, KVLayout, tokens_in_flight
from quire.core.errors import ConfigError
from quire.planner.drafts import DraftCosts
from quire.planner.pace import Pace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and switches of one scheduler; checked when it is built (ConfigError)."""

    n_pages: int
    """Pages of a pool, the dummy page 0 included."""
    page_size: int
    """Tokens a page holds."""
    kv: KVLayout = PLAIN
    """Which groups of layers have page tables of their own."""
    n_dp_ranks: int = 1
    """Data-parallel ranks: each has a pool of pages, slots and a token budget of its own, all alike."""
    max_num_seqs: int
    """Slots of a data-parallel rank: most of its sequences that run at once."""
    max_num_batched_tokens: int
    """Most tokens in one step; at least `max_num_seqs`, so that every running sequence can decode in every step."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step; 0: only the step's own budget."""
    n_adapters: int = 0
    """Places for adapters on the device: most different ones in one step."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    has_states: bool = False
    """The model has recurrent states: a slot holds the state of its sequence, behind its last planned token."""
    n_snapshots: int = 0
    """States that can be kept for later sequences; without any, nothing cached is of use to a model with states."""
    deterministic_apart: bool = False
    """Pages of deterministic requests have bits of their own, and those of outputs differ from those of prompts: of
    theirs only prompts enter the prefix tree, for their like."""
    pipeline_depth: int = 2
    """Most steps in flight."""
    n_stages: int = 1
    """Of the pipeline that the device is: so many steps are computed at once, of different sequences."""
    min_shared_tokens: int = 0
    """Shortest common prefix of decoding sequences that a plan mentions in `shared_prefixes`; 0: none is mentioned."""
    max_num_waiting: int = 8192
    """Most sequences (each of a request's `n` counts) that wait besides those that free slots can take; a request
    beyond is refused with QueueFull."""
    num_speculative_tokens: int = 0
    """Most drafts that a span verifies behind the token of a decoding sequence."""
    draft_costs: DraftCosts | None = None
    """By which the number is chosen for each span; None: as many as there is room for."""
    drafts_copy: bool = False
    """Drafts are what stood before in a text."""
    max_sampled: int = 0
    """Most tokens that one step chooses, drafts counted in; 0: `max_num_seqs`, or one sequence with all its drafts."""
    pace: Pace | None = None
    """Bounds the prompt tokens of a step in which sequences decode; None: only the step's token budget does."""

    def __post_init__(self) -> None:
        for name, low in (
            ("n_pages", 2),
            ("page_size", 1),
            ("max_num_seqs", 1),
            ("n_dp_ranks", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("long_prefill_token_threshold", 0),
            ("min_shared_tokens", 0),
            ("num_speculative_tokens", 0),
            ("n_snapshots", 0),
            ("max_sampled", 0),
            ("n_adapters", 0),
            ("pipeline_depth", 1),
            ("n_stages", 1),
            ("max_num_waiting", 1),
        ):
            value = getattr(self, name)
            if value < low:
                raise ConfigError(f"{name} = {value} is too small: the scheduler needs at least {low}")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy = {self.policy!r} is unknown: choose 'fcfs' or 'priority'")
        if self.has_states and self.num_speculative_tokens:
            raise ConfigError(
                "drafts cannot be verified by a model with recurrent states: a rejected one stays in them"
            )
        if self.n_dp_ranks > 1 and (self.num_speculative_tokens or self.n_stages > 1):
            raise ConfigError("data-parallel ranks have neither drafts nor stages of a pipeline yet")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = "
                f"{self.max_num_seqs}: every running sequence needs one token a step; raise one or lower the other"
            )

    @property
    def most_sampled(self) -> int:
        """Of `max_sampled`, the number."""
        return self.max_sampled or max(self.max_num_seqs, 1 + self.num_speculative_tokens)

    @property
    def n_slots(self) -> int:
        """Of all data-parallel ranks: neighbouring slots are of one of them."""
        return self.n_dp_ranks * self.max_num_seqs

    @property
    def max_num_live(self) -> int:
        """Most sequences at once, running or waiting."""
        return self.n_slots + self.max_num_waiting

    @property
    def n_usable_pages(self) -> int:
        """Pages of one pool that sequences can hold (all but the dummy page)."""
        return self.n_pages - 1

    def pages_for(self, n_tokens: int) -> int:
        """Entries of a page table that `n_tokens` tokens of one sequence take."""
        return -(-n_tokens // self.page_size)

    def pages_of(self, n_tokens: int) -> list[int]:
        """Pages of each group that a sequence of `n_tokens` tokens needs at once."""
        in_flight = tokens_in_flight(self.pipeline_depth, self.num_speculative_tokens)
        return self.kv.pages_of(n_tokens, self.page_size, in_flight)
