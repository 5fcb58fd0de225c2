"""What followers are told of prefix trees, beside a slow oracle."""

from __future__ import annotations

import random

import pytest
from followed_trees import Told, held

from quire.control import tree_digests
from quire.control.cache import PageCache
from quire.control.config import SchedulerConfig
from quire.control.digests import MAX_DIGESTS, cut_up, prompt_digests
from quire.control.tree_digests import TreeDigests

SIZE = 2
N_PAGES = 40


def cache() -> PageCache:
    return PageCache(
        SchedulerConfig(n_pages=N_PAGES, page_size=SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    )


class World:
    """Caches, whoever keeps their digests, and followers by their tickets."""

    def __init__(self, n_caches: int = 1) -> None:
        self.caches = [cache() for _ in range(n_caches)]
        self.digests = TreeDigests()
        self.told: dict[int, Told] = {}

    def follow(self, ticket: int) -> None:
        self.told.setdefault(ticket, Told())
        self.digests.follow(ticket, self.caches)

    def update(self) -> int:
        """Digests that are still to come, of the followers together."""
        n_left = 0
        for ticket, update in self.digests.updates(self.caches):
            self.told[ticket].take(update)
            n_left += update.n_left
        return n_left

    def put(self, tokens: list[int], salt: str = "", rank: int = 0) -> None:
        """As a sequence that ends does."""
        one = self.caches[rank]
        pages = one.take(len(tokens) // SIZE)
        node, _ = one.tree.extend(salt, None, 0, tokens, [pages], len(pages), through=True)
        if node is not None:
            one.tree.unlock(node)
        one.pool.drop(pages)

    def act(self, rng: random.Random) -> None:
        rank = rng.randrange(len(self.caches))
        tree = self.caches[rank].tree
        match rng.randrange(10):
            case 0 if tree.n_evictable:
                tree.evict(rng.randint(1, tree.n_evictable))
            case 1 if tree.roots:
                root = rng.choice([*tree.roots.values()])
                tree.detach(rng.choice([*root.children.values()]))
            case 2:
                self.caches[rank].forget()
            case _:
                tokens = [rng.randrange(2) for _ in range(SIZE * rng.randint(1, 8))]
                self.put(tokens, rng.choice(["", "a"]), rank)


@pytest.mark.parametrize("n_caches", [1, 2])
def test_followers_know_what_trees_hold(n_caches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_digests, "MAX_UPDATE", 7)
    for seed in range(20):
        rng, world = random.Random(seed), World(n_caches)
        for _ in range(10 * (seed % 2)):
            world.act(rng)
        world.follow(1)
        for step in range(150):
            world.act(rng)
            if step == 60:
                world.follow(2)
            truth = held(*world.caches)
            if rng.random() < 0.5:
                world.update()
                assert all(told.n_bytes <= 7 * 8 for told in world.told.values())
            for told in world.told.values():
                assert len(told.digests) <= n_caches * N_PAGES, "never more than there can be"
            assert world.digests.n_waiting <= sum(len(told.digests) + len(truth) for told in world.told.values())
        while world.update():
            pass
        assert world.told[1].digests == world.told[2].digests == held(*world.caches), "also who came late"


def test_nothing_is_kept_while_nobody_follows() -> None:
    world = World()
    world.put([1, 2, 3, 4])
    (root,) = world.caches[0].tree.roots.values()
    assert [one.digests for one in world.caches[0].tree.subtree(root)] == [b"", b""]
    world.follow(1)
    world.digests.unfollow(1)
    assert not [*world.digests.updates(world.caches)] and world.caches[0].tree.digests is None
    world.put([1, 2, 5, 6, 7, 8])
    world.follow(2)
    world.update()
    assert world.told[2].digests == held(*world.caches), "what grew meanwhile too"


def test_what_came_and_went_between_two_updates_is_not_told() -> None:
    world = World()
    world.follow(1)
    world.put([1, 2, 3, 4])
    world.update()
    world.put([5, 6, 7, 8])
    world.caches[0].forget()
    world.put([1, 2])
    ((_, update),) = world.digests.updates(world.caches)
    assert (len(cut_up(update.removed)), update.added) == (1, b"")


def test_caches_of_a_new_start_are_told_from_the_beginning() -> None:
    world = World()
    world.follow(1)
    world.put([1, 2, 3, 4])
    world.update()
    world.caches = [cache()]
    world.put([5, 6])
    world.update()
    assert world.told[1].number == 1 and world.told[1].digests == held(*world.caches)
    world.follow(1)
    world.update()
    assert world.told[1].number == 1 and world.told[1].digests == held(*world.caches), "asked again"
    world.caches = [cache()]
    world.put([7, 8])
    world.follow(2)
    world.update()
    assert world.told[1].digests == world.told[2].digests == held(*world.caches), "also when another asks first"


def test_prompts_have_the_digests_of_the_pages_that_they_find() -> None:
    world = World()
    world.follow(1)
    tokens = [*range(1, 12)]
    world.put(tokens, "salt")
    world.update()
    found = prompt_digests(tokens, SIZE, "salt")
    assert len(found) == 5 and world.told[1].digests == {*found}
    assert not world.told[1].digests.intersection(prompt_digests(tokens, SIZE, "other"))
    assert len(prompt_digests([0] * (SIZE * (MAX_DIGESTS + 9)), SIZE)) == MAX_DIGESTS
