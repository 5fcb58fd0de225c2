"""Early exit for an engine in this process, for `quire bench tradeoffs`: puts the strategy before the worker's others.

Owns when that is possible. Does not own the strategy (`compute/forward/early_exit`).
"""

from __future__ import annotations

from quire.compute.forward.early_exit import EarlyExitForward, ExitRule, exit_obstacle
from quire.compute.worker import Worker
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError


def leave_early(worker: Worker, config: EngineConfig, layer: int, threshold: float) -> EarlyExitForward:
    """From now on tokens leave after `layer` layers, where the best one has this probability. The engine, of `config`,
    has done nothing yet. Raises ConfigError where they cannot."""
    rule = ExitRule(layer, threshold)
    reason = exit_obstacle(worker.model, rule)
    if config.enable_prefix_caching or not config.max_num_batched_tokens:
        reason = "it needs an explicit max_num_batched_tokens, and no prefix cache: pages may lack keys of upper layers"
    if config.speculative_config or config.enable_lora:
        reason = "drafts and adapters go through all layers"
    if reason is not None:
        raise ConfigError(f"early exit: {reason}")
    runner = worker.runner
    forward = EarlyExitForward(
        worker.platform.device, worker.model, runner.pool, runner.tables, runner.tail, rule,
        max_rows=config.max_num_batched_tokens,
    )  # fmt: skip
    runner.put_first(forward)
    return forward
