"""Who is asked what its prefix trees hold, and when again."""

from __future__ import annotations

from quire.core.commands import Command, FollowPrefixes
from quire.core.events import PrefixUpdate
from quire.engine.replicas.chooser import Chooser
from quire.engine.replicas.following import ANSWER_S, UNTOLD_S, PrefixFollowing


class World:
    """Two replicas, and what they were asked."""

    def __init__(self) -> None:
        self.chooser, self.asked, self.tickets = Chooser(), list[str](), set[int]()
        for name in "ab":
            self.chooser.introduce(name, 8, 64, 4)
        self.following = PrefixFollowing(self.chooser, self._send)

    async def _send(self, name: str, command: Command) -> None:
        assert isinstance(command, FollowPrefixes)
        self.asked.append(name)
        self.tickets.add(command.ticket)

    async def look(self, now_s: float, names: str = "ab") -> list[str]:
        """Who is asked."""
        self.asked = []
        await self.following.look(names, now_s)
        return self.asked

    def say(self, name: str, number: int, now_s: float) -> None:
        self.following.take(name, PrefixUpdate(number, b"", b""), now_s)


async def test_each_is_asked_until_it_answers() -> None:
    world = World()
    assert await world.look(100) == ["a", "b"]
    assert await world.look(100.5) == []
    world.say("a", 0, 100.5)
    assert await world.look(100.1 + ANSWER_S) == ["b"]
    assert len(world.tickets) == 1, "asked again it begins anew, and is no second follower"


async def test_one_that_says_nothing_or_lost_something_is_asked_again() -> None:
    world = World()
    await world.look(100)
    for name in "ab":
        world.say(name, 0, 101)
    assert await world.look(104) == []
    world.say("a", 1, 104)
    world.say("b", 2, 104)
    assert await world.look(104.5) == ["b"], "a gap"
    world.say("b", 3, 105)
    world.say("b", 0, 105)
    assert await world.look(104.1 + UNTOLD_S) == ["a"], "for long"


async def test_a_replica_that_is_gone_is_forgotten() -> None:
    world = World()
    await world.look(100)
    world.chooser.dismiss("a")
    assert await world.look(100.5, "b") == []
    world.chooser.introduce("a", 8, 64, 4)
    assert await world.look(101) == ["a"], "as it comes back"
    assert await world.look(101, "b") == [] and world.following._asked_s.keys() == {"b"}
