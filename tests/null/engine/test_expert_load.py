"""The figure of how unevenly experts are chosen, and how often it is read."""

from __future__ import annotations

from quire.core.balance import BalanceFacts
from quire.core.events import EngineStats
from quire.engine.expert_load import PERIOD_S, ExpertLoad, imbalance, load_map, since


def test_imbalance_is_the_busiest_over_the_mean_of_all_layers() -> None:
    assert imbalance([[3, 3, 3, 3]]) == 1.0
    assert imbalance([[12, 0, 0, 0]]) == 4.0
    assert imbalance([[12, 0, 0, 0], [3, 3, 3, 3]]) == 2.5
    assert since([[4, 0, 0, 0], [8, 2, 5, 5]], [[12, 0, 0, 0], [9, 3, 6, 6]]) == [[8, 0, 0, 0], [1, 1, 1, 1]]
    assert imbalance([[0, 0]]) == imbalance([]) == 0.0


def test_sleep_keeps_the_counts_and_wakings_are_none() -> None:
    """At level 2 compute counts from nothing again; sleep may deepen, and a waking runs steps of its own."""
    now = [[0, 0, 0, 0]]
    load = ExpertLoad(lambda: [list(layer) for layer in now], [0])
    now[0] = [6, 2, 0, 0]
    assert load.counts() == [[6, 2, 0, 0]]
    load.rest()
    load.rest()
    now[0] = [1, 1, 1, 1]
    assert load.counts() == [[6, 2, 0, 0]], "asleep"
    load.go_on()
    assert load.counts() == [[6, 2, 0, 0]]
    now[0] = [1, 5, 5, 5]
    assert load.counts() == [[6, 6, 4, 4]] and load.imbalance(0.0) == 6 * 4 / 20
    load.rest()
    load.go_on()
    assert load.counts() == [[6, 6, 4, 4]]


def test_it_is_read_now_and_then() -> None:
    read: list[int] = []

    def loads() -> list[list[int]]:
        read.append(1)
        return [[len(read), 5]]

    load = ExpertLoad(loads, [0])
    read.clear()
    assert load.imbalance(100.0) == 0.0, "nothing since the start"
    assert load.imbalance(100.0 + PERIOD_S / 2) == 0.0 and len(read) == 1
    assert load.imbalance(100.0 + PERIOD_S) == 2.0 and len(read) == 2


def test_each_expert_has_its_share_of_the_mean() -> None:
    assert load_map([[4, 4, 4, 4], [40, 0, 1, 39], [0, 0]]) == [b"\x10" * 4, bytes([32, 0, 0, 31]), b"\0\0"]
    assert load_map([[900] + [0] * 63]) == [b"\xff" + bytes(63)]
    stats, now = EngineStats(), [[0, 0]]
    load = ExpertLoad(lambda: [list(layer) for layer in now], [4])
    now[0] = [3, 1]
    load.note(stats, 0.0)
    assert stats.expert_map == [bytes([24, 8])] and stats.expert_layers == [4]


def test_figures_of_experts_that_move_are_told_too() -> None:
    class Balancer:
        facts = BalanceFacts(n_rearranged=2, before=1.5, after=1.25)

    stats = EngineStats()
    ExpertLoad(lambda: [[1, 3]], [0]).note(stats, 0.0)
    assert stats.expert_balance is None
    counts = iter([[[3, 0]], [[3, 9]]])
    load = ExpertLoad(lambda: next(counts), [0], Balancer())
    load.note(stats, 0.0)
    assert stats.expert_balance == Balancer.facts and stats.expert_imbalance == 2.0
