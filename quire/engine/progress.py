"""When an engine that lives makes no progress. Owns the limits, by device."""

from __future__ import annotations

STEP_LIMIT_S = {"cpu": 600.0, "cuda": 30.0, "null": 10.0}
"""By device: the longest that one step may compute. On a CPU a large prefill takes minutes; on a GPU a step takes less
than a second, and the limit leaves room for kernels that are compiled late."""
STALL_LIMIT_S = 10.0
"""Work waits but no step is in flight: the scheduler makes no plan."""
SILENCE_LIMIT_S = {"cpu": 10.0, "cuda": 30.0, "null": 10.0}
"""A live engine reports at least once a second, on a CPU also during a step; on CUDA the wait for a step cannot be
divided, so that silence may last as long as one."""


def makes_progress(device: str, silent_s: float, step_age_s: float, steps_in_flight: int, limit_s: float = 0.0) -> bool:
    """Whether an engine that reported this last, and nothing for `silent_s`, is within the limits of its device.

    limit_s: takes the place of all of them if it is not 0.
    """
    step_limit_s = limit_s or (STEP_LIMIT_S[device] if steps_in_flight else STALL_LIMIT_S)
    return silent_s < (limit_s or SILENCE_LIMIT_S[device]) and step_age_s < step_limit_s
