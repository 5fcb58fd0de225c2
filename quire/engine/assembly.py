"""The loop over any executor: scheduler and core from options. What `build.py` and the simulator have in common.

Owns which option becomes which limit of the scheduler. Does not own executors, workers or text; imports no torch.
"""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.context import page_tokens
from quire.config.engine import EngineConfig
from quire.config.kv import KVLayout
from quire.config.mesh import depth_of
from quire.config.resolve import EngineLimits
from quire.config.speculative import COPYING
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import Clock
from quire.engine.capacity import kv_itemsize
from quire.engine.core import EngineCore
from quire.engine.executors.executor import Executor
from quire.engine.grammars.manager import StructuredOutput
from quire.planner.calibration import Ceilings
from quire.planner.drafts import DraftCosts
from quire.planner.pace import Pace, pace_for


def pace_of(limits: EngineLimits, arch: ModelArch, ceilings: Ceilings, weight_itemsize: float) -> Pace | None:
    """The bound on prompts beside decodes, if there is one. ceilings: of the engine's device."""
    if not limits.max_stall_factor:
        return None
    return pace_for(arch, ceilings, limits.max_stall_factor, weight_itemsize, kv_itemsize(limits, arch))


def assemble(
    config: EngineConfig,
    limits: EngineLimits,
    layout: KVLayout,
    executor: Executor,
    clock: Clock,
    n_pages: int,
    grammars: StructuredOutput,
    min_shared_tokens: int = 0,
    pace: Pace | None = None,
    draft_costs: DraftCosts | None = None,
    *,
    deterministic_apart: bool = False,
    has_states: bool = False,
    n_snapshots: int = 0,
) -> EngineCore:
    """The loop over an executor."""
    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=n_pages,
            page_size=page_tokens(config),
            kv=layout,
            n_dp_ranks=config.data_parallel_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            deterministic_apart=deterministic_apart,
            has_states=has_states,
            n_snapshots=n_snapshots,
            pipeline_depth=depth_of(config),
            n_stages=config.pipeline_parallel_size,
            min_shared_tokens=min_shared_tokens,
            max_num_waiting=config.max_num_waiting,
            pace=pace,
            num_speculative_tokens=limits.max_drafts,
            max_sampled=limits.max_sampled,
            n_adapters=config.max_loras if config.enable_lora else 0,
            draft_costs=draft_costs,
            drafts_copy=(config.speculative_config or {}).get("method") in COPYING,
        ),
        clock,
    )
    return EngineCore(scheduler, executor, clock, depth_of(config), grammars)
