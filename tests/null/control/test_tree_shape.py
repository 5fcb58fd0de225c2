"""The picture of the prefix tree: every page once, parents first, bounded."""

from __future__ import annotations

from quire.control.config import SchedulerConfig
from quire.control.gauges import MAX_TREE_NODES, MAX_WALKED_NODES, tree_shape
from quire.control.node import Node
from quire.control.pages import PagePool
from quire.control.scheduler import Scheduler
from quire.control.tree import PrefixTree
from quire.core.clock import VirtualClock
from quire.core.request import Request
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams


def scheduler_after(prompts: list[list[int]]) -> Scheduler:
    """One that has run these prompts, a token each, and holds nothing any more."""
    config = SchedulerConfig(n_pages=2000, page_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    scheduler = Scheduler(config, VirtualClock())
    for i, prompt in enumerate(prompts):
        scheduler.submit(
            Request(request_id=str(i), prompt_token_ids=prompt, params=SamplingParams(), max_tokens=1, seed=0)
        )
        while scheduler.has_work():
            plan = scheduler.schedule()
            assert plan is not None
            n = sum(plan.spans.wants)
            scheduler.commit(StepResult(plan.step, [7] * n, [1] * n))
    return scheduler


def test_shape_of_a_small_tree() -> None:
    common = list(range(8))
    scheduler = scheduler_after([[*common, *[1] * 4], [*common, *[2] * 12], [9] * 4])
    shape = tree_shape(scheduler.live.cache.tree)
    assert sorted(shape) == sorted(
        [(-1, 2, 0), (-1, 1, 0), (shape.index((-1, 2, 0)), 1, 0), (shape.index((-1, 2, 0)), 3, 0)]
    )
    assert sum(pages for _, pages, _ in shape) == scheduler.live.cache.tree.n_pages
    assert all(parent < i for i, (parent, _, _) in enumerate(shape))
    assert scheduler.stats().tree == shape and scheduler.stats(with_map=False).tree == []


def test_a_wide_tree_is_cut() -> None:
    scheduler = scheduler_after([[i, *[0] * 3, *[i] * 4] for i in range(400)])
    assert len(tree_shape(scheduler.live.cache.tree)) == MAX_TREE_NODES
    assert scheduler.stats().n_tree_nodes == scheduler.live.cache.tree.n_nodes == 400


def test_a_cut_keeps_the_heaviest() -> None:
    """Weight is what hangs below too: the last prompts of many are long, or share a beginning."""
    light = [[i, *[0] * 3] for i in range(300)]
    heavy = [[500, *[1] * 39], [600, *[2] * 3, *[3] * 20], [600, *[2] * 3, *[4] * 8]]
    scheduler = scheduler_after([*light, *heavy])
    shape = tree_shape(scheduler.live.cache.tree)
    assert len(shape) == MAX_TREE_NODES and all(parent < i for i, (parent, _, _) in enumerate(shape))
    below = [(parent, pages) for parent, pages, _ in shape if parent >= 0]
    assert (-1, 10, 0) in shape and sorted(pages for _, pages in below) == [2, 5]
    assert len({parent for parent, _ in below}) == 1 and shape[below[0][0]] == (-1, 1, 0)
    assert sum(pages for _, pages, _ in shape) == 10 + 8 + (MAX_TREE_NODES - 4)


def test_of_a_huge_tree_the_part_nearest_to_the_root_is_weighed() -> None:
    tree = PrefixTree(PagePool(MAX_WALKED_NODES + 60), 1)
    for i in range(MAX_WALKED_NODES + 40):
        tree.roots.setdefault("", Node(None, "", [], [[]], 0)).children[str(i).encode()] = Node(None, "", [i], [[i]], i)
    assert len(tree_shape(tree)) == MAX_TREE_NODES
