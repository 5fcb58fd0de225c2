"""An engine process without a model whose steps take a given time: `python paced_engine.py STEP_MS`, by a supervisor.

0 ms: as fast as the control plane goes. What is left of a server is then its API layer.
"""

from __future__ import annotations

import sys
import time

from quire.config.engine import EngineConfig
from quire.core.events import EngineReady
from quire.core.plan import StepPlan
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.engine.process import main


def build(config: EngineConfig, *, is_server: bool) -> tuple[EngineCore, EngineReady]:
    """The null engine, slowed down."""
    core, ready = build_engine(config, is_server=is_server)
    step_s, submit = float(sys.argv[1]) / 1000, core.executor.submit
    next_s = 0.0

    def paced(plan: StepPlan):  # type: ignore[no-untyped-def]
        nonlocal next_s
        wait_s = next_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        next_s = time.monotonic() + step_s
        return submit(plan)

    core.executor.submit = paced  # type: ignore[method-assign]
    return core, ready


if __name__ == "__main__":
    sys.exit(main(build))
