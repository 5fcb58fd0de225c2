"""Figures that some engines have: how unevenly experts are chosen, and what each data-parallel rank does."""

from __future__ import annotations

from quire.core.events import EngineStats
from quire.serve.ops.metrics import Metrics


async def test_the_figure_is_there_with_experts_only() -> None:
    metrics = Metrics()
    assert b"expert" not in await metrics.text(EngineStats())
    assert b'quire:expert_imbalance{model_name=""} 1.5' in await metrics.text(EngineStats(expert_imbalance=1.5))


async def test_data_parallel_ranks_are_told_apart() -> None:
    metrics = Metrics()
    assert b"dp_rank" not in await metrics.text(EngineStats(n_pages=20, n_running=3))
    text = await metrics.text(EngineStats(n_pages=20, dp_running=[3, 1], dp_pages_free=[5, 10]))
    assert b'quire:dp_num_requests_running{dp_rank="1",model_name=""} 1.0' in text
    assert b'quire:dp_kv_cache_usage_perc{dp_rank="0",model_name=""} 0.5' in text
