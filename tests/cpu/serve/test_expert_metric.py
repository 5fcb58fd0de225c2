"""How unevenly experts are chosen is told of models that have some."""

from __future__ import annotations

from quire.core.events import EngineStats
from quire.serve.ops.metrics import Metrics


async def test_the_figure_is_there_with_experts_only() -> None:
    metrics = Metrics()
    assert b"expert" not in await metrics.text(EngineStats())
    assert b'quire:expert_imbalance{model_name=""} 1.5' in await metrics.text(EngineStats(expert_imbalance=1.5))
