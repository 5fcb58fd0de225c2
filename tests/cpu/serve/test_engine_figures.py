"""Figures that some engines have: how unevenly experts are chosen, and what each data-parallel rank does."""

from __future__ import annotations

from quire.core.balance import BalanceFacts
from quire.core.events import EngineStats
from quire.core.routing import ReplicaRouting, RoutingStats
from quire.serve.ops.metrics import Metrics


async def test_the_figure_is_there_with_experts_only() -> None:
    metrics = Metrics()
    assert b"expert" not in await metrics.text(EngineStats())
    assert b'quire:expert_imbalance{model_name=""} 1.5' in await metrics.text(EngineStats(expert_imbalance=1.5))


async def test_layers_of_experts_are_told_apart() -> None:
    text = await Metrics().text(EngineStats(expert_map=[b"\x10\x10", b"\x20\0"], expert_layers=[1, 3]))
    assert b'quire:expert_layer_imbalance{layer="1",model_name=""} 1.0' in text
    assert b'quire:expert_layer_imbalance{layer="3",model_name=""} 2.0' in text
    assert b'quire:expert_layer_idle{layer="3",model_name=""} 1.0' in text
    assert b'layer="0"' not in text


async def test_a_layer_without_a_load_is_not_told_of() -> None:
    """All of its experts would be idle."""
    assert b"expert" not in await Metrics().text(EngineStats(expert_map=[b"\0\0", b"\0\0"], expert_layers=[1, 2]))
    text = await Metrics().text(EngineStats(expert_map=[b"\0\0", b"\x10\x10"], expert_layers=[1, 2]))
    assert b'layer="1"' not in text and b'quire:expert_layer_idle{layer="2",model_name=""} 0.0' in text


async def test_experts_that_move_have_figures() -> None:
    metrics = Metrics()
    assert b"rank_imbalance" not in await metrics.text(EngineStats(expert_imbalance=1.5))
    facts = BalanceFacts(
        n_rearranged=3, before=1.75, after=1.25, n_moved=9, moved_bytes=4096, last_s=0.5, longest_s=0.125
    )
    text = await metrics.text(EngineStats(expert_balance=facts))
    assert b'quire:expert_rank_imbalance{model_name="",placement="before"} 1.75' in text
    assert b'quire:expert_rank_imbalance{model_name="",placement="after"} 1.25' in text
    assert b'quire:expert_rearrangements_total{model_name=""} 3.0' in text
    assert b'quire:expert_slots_changed_total{model_name=""} 9.0' in text
    assert b'quire:expert_moved_bytes_total{model_name=""} 4096.0' in text
    assert b'quire:expert_rearrangement_seconds{model_name="",part="all"} 0.5' in text
    assert b'quire:expert_rearrangement_seconds{model_name="",part="longest"} 0.125' in text


async def test_data_parallel_ranks_are_told_apart() -> None:
    metrics = Metrics()
    assert b"dp_rank" not in await metrics.text(EngineStats(n_pages=20, n_running=3))
    text = await metrics.text(EngineStats(n_pages=20, dp_running=[3, 1], dp_pages_free=[5, 10]))
    assert b'quire:dp_num_requests_running{dp_rank="1",model_name=""} 1.0' in text
    assert b'quire:dp_kv_cache_usage_perc{dp_rank="0",model_name=""} 0.5' in text


async def test_replicas_have_figures() -> None:
    assert b"replica" not in await Metrics().text(EngineStats())
    one = ReplicaRouting("a", n_open=3, prefix_pages=40, coming_pages=5, is_known=True)
    routing = RoutingStats([one, ReplicaRouting("b")], 640, 600, 48, 2, 1)
    text = await Metrics().text(EngineStats(routing=routing))
    for name, value in (("num_seqs_open", 3), ("prefix_pages", 40), ("prefix_pages_coming", 5), ("prefixes_known", 1)):
        assert f'quire:replica_{name}{{model_name="",replica="a"}} {value}.0'.encode() in text
        assert f'quire:replica_{name}{{model_name="",replica="b"}} 0.0'.encode() in text
    counts = {"expected_tokens": 640, "found_tokens": 600, "missed_tokens": 48, "pictures": 2, "gaps": 1}
    for name, value in counts.items():
        assert f'quire:routing_{name}_total{{model_name=""}} {value}.0'.encode() in text
