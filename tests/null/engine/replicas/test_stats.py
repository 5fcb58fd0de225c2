"""The figures of several engines as those of one."""

from __future__ import annotations

import msgspec
import pytest

from quire.core.adapters import AdapterFacts
from quire.core.events import EngineReady, EngineStats
from quire.engine.replicas.stats import COUNTERS, GAUGES, ReplicaFigures

READY = EngineReady(max_model_len=100, n_pages=10, page_size=4, logits_width=9, device="cpu", max_num_seqs=8)


def test_gauges_are_of_those_that_live_and_counters_of_all() -> None:
    figures = ReplicaFigures()
    for name in "ab":
        figures.introduce(name, READY)
    figures.note("a", EngineStats(n_running=2, steps=5, finished={"stop": 1}, accepted_at=[3], n_pages=10))
    figures.note("b", EngineStats(n_running=1, steps=7, finished={"stop": 2, "length": 1}, accepted_at=[1, 1]))
    stats = figures.stats()
    assert (stats.n_running, stats.steps, stats.n_pages) == (3, 12, 10)
    assert (stats.finished, stats.accepted_at) == ({"stop": 3, "length": 1}, [4, 1])
    figures.dismiss("a")
    stats = figures.stats()
    assert (stats.n_running, stats.steps, stats.n_pages) == (1, 12, 0)
    assert (stats.finished, stats.accepted_at) == ({"stop": 3, "length": 1}, [4, 1])


def test_a_new_engine_of_a_replica_goes_on_counting() -> None:
    figures = ReplicaFigures()
    figures.introduce("a", READY)
    figures.note("a", EngineStats(steps=5))
    figures.introduce("a", READY)
    assert figures.stats().steps == 5
    figures.note("a", EngineStats(steps=2))
    assert figures.stats().steps == 7
    figures.dismiss("a")
    figures.introduce("a", READY)
    assert figures.stats().steps == 7


def test_every_figure_is_accounted_for() -> None:
    others = {"finished", "accepted_at", "expert_imbalance", "last_step_age_s", "is_asleep", "is_late"}
    others |= {"tree", "page_map", "adapters", "running_adapters", "waiting_adapters"}
    others |= {"routing"}  # the chooser's
    others |= {"expert_map", "expert_layers", "expert_balance"}  # of one engine alone, as are the next
    others |= {"dp_running", "dp_pages_free"}
    assert {*GAUGES, *COUNTERS} | others == set(EngineStats.__struct_fields__)
    assert not {*GAUGES} & {*COUNTERS}


def test_adapters_are_those_that_all_have() -> None:
    figures = ReplicaFigures()
    both, one = AdapterFacts("both", "/b", "0", 8), AdapterFacts("one", "/o", "1", 8)
    for name, adapters in (("a", [both, one]), ("b", [both])):
        figures.introduce(name, READY)
        figures.note(name, EngineStats(adapters=adapters, running_adapters=["both"], waiting_adapters=[name]))
    stats = figures.stats()
    assert stats.adapters == [both]
    assert (stats.running_adapters, stats.waiting_adapters) == (["both"], ["a", "b"])
    assert (figures.content_of("both"), figures.content_of("one"), figures.content_of("none")) == ("0", "", "")


def test_one_name_with_two_contents_is_no_adapter_of_all() -> None:
    figures = ReplicaFigures()
    same = AdapterFacts("same", "/s", "0", 8)
    for name, content in (("a", "1"), ("b", "2")):
        figures.introduce(name, READY)
        figures.note(name, EngineStats(adapters=[AdapterFacts("x", "/x", content, 8), same]))
    assert figures.stats().adapters == [same] and figures.content_of("x") == ""
    figures.note("a", EngineStats(adapters=[AdapterFacts("x", "/elsewhere", "2", 8), same]))
    assert [one.name for one in figures.stats().adapters] == ["x", "same"] and figures.content_of("x") == "2"


def test_trees_stand_side_by_side() -> None:
    figures = ReplicaFigures()
    for name in "ab":
        figures.introduce(name, READY)
        figures.note(name, EngineStats(tree=[(-1, 2, 0), (0, 1, 1)], page_map=b"\0\1"))
    stats = figures.stats()
    assert stats.tree == [(-1, 2, 0), (0, 1, 1), (-1, 2, 0), (2, 1, 1)]
    assert stats.page_map == b"\0\1\0\1"


def test_experts_are_those_of_the_most_uneven_replica() -> None:
    figures = ReplicaFigures()
    assert figures.stats().expert_map == []
    for name, imbalance, loads in (("a", 1.0, b"\x10\x10"), ("b", 1.5, b"\x18\x08")):
        figures.introduce(name, READY)
        figures.note(name, EngineStats(expert_imbalance=imbalance, expert_map=[loads], expert_layers=[3]))
    assert (figures.stats().expert_imbalance, figures.stats().expert_map) == (1.5, [b"\x18\x08"])
    assert figures.stats().expert_layers == [3]


def test_limits_are_those_that_all_keep() -> None:
    figures = ReplicaFigures()
    with pytest.raises(RuntimeError):
        figures.ready(0)
    figures.introduce("a", READY)
    figures.introduce("b", msgspec.structs.replace(READY, max_model_len=50, max_num_seqs=4, no_determinism="why"))
    ready = figures.ready(3)
    assert (ready.max_model_len, ready.max_num_seqs, ready.n_pages, ready.engine) == (50, 12, 20, 3)
    assert ready.no_determinism == "why"
