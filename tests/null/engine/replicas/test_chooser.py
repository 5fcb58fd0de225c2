"""Which replica takes a request."""

from __future__ import annotations

import pytest

from quire.control.cache import salt_of
from quire.control.digests import prompt_digests
from quire.core.events import PrefixUpdate
from quire.core.request import Request, Terms
from quire.core.sampling import SamplingParams
from quire.engine.replicas.chooser import Chooser, chooser_of

PAGE = 4
A, B, C = "abc"


def request(tokens: list[int], *, user: str = "", salt: str = "", n: int = 1, content: str = "") -> Request:
    return Request(
        request_id="r", prompt_token_ids=tokens, params=SamplingParams(n=n), max_tokens=8, seed=0, cache_salt=salt,
        terms=Terms(user=user), adapter="x" if content else "", content_id=content,
    )  # fmt: skip


class World:
    """Three replicas of 8 slots and 64 pages; requests are numbered."""

    def __init__(self, n_slots: int = 8, n_pages: int = 64) -> None:
        self.chooser = Chooser()
        for name in (A, B, C):
            self.chooser.introduce(name, n_slots, n_pages, PAGE)
        self._n = 0

    def place(self, tokens: list[int], replicas: str = "abc", **options: object) -> tuple[str, str]:
        """(the replica that takes it, the request's name)."""
        self._n += 1
        name = str(self._n)
        self.chooser.expect(name, request(tokens, **options))  # type: ignore[arg-type]
        first = self.chooser.rank(name, [*replicas])[0]
        self.chooser.placed(name, first)
        return first, name

    def run(self, tokens: list[int], replicas: str = "abc", **options: object) -> str:
        """As `place`, and it has ended when this returns."""
        replica, name = self.place(tokens, replicas, **options)
        self.chooser.done(name)
        return replica


def prompt(first: int, n: int = 41) -> list[int]:
    return [first, *range(1, n)]


def test_requests_that_share_nothing_are_spread() -> None:
    world = World()
    placed = [world.place(prompt(100 + number))[0] for number in range(12)]
    assert sorted(placed) == [A] * 4 + [B] * 4 + [C] * 4
    assert set(placed[:3]) == {A, B, C}


def test_pages_of_another_adapter_of_the_same_name_are_not_counted_on() -> None:
    world = World()
    first = world.run(prompt(1), content="1")
    assert world.run(prompt(1), content="1") == first, "its pages are there"
    others = {world.run(prompt(1), content=f"{number}") for number in (2, 3)}
    assert first not in others and len(others) == 2, "as if it were new"


def test_who_comes_back_with_more_of_the_same_goes_where_it_was() -> None:
    world = World()
    homes = [world.run(prompt(100 + number)) for number in range(3)]
    assert set(homes) == {A, B, C}
    for turn in (60, 80):
        assert [world.run(prompt(100 + number, turn)) for number in range(3)] == homes


def test_a_short_common_beginning_draws_nobody() -> None:
    world = World()
    system = [7] * (2 * PAGE)  # two pages of ten
    placed = [world.run(system + prompt(100 + number, 33)) for number in range(6)]
    assert sorted(placed) == [A, A, B, B, C, C]


def test_a_long_common_beginning_draws_until_the_replica_is_overloaded() -> None:
    world = World(n_slots=64)
    system = list(range(1000, 1040))
    placed = [world.place([*system, number, number])[0] for number in range(30)]
    home = placed[0]
    n_drawn = next(number for number, replica in enumerate(placed) if replica != home)
    assert n_drawn == 4 + 64 // 4 + 1
    assert set(placed) != {home}


def test_a_full_replica_is_passed_by() -> None:
    world = World(n_slots=2)
    tokens = prompt(5)
    home = world.run(tokens)
    for _ in range(2):
        assert world.place(tokens)[0] == home
    assert world.place(tokens)[0] != home


def test_a_salt_separates() -> None:
    assert prompt_digests(prompt(1), PAGE, "x") != prompt_digests(prompt(1), PAGE)
    world = World()
    world.run(prompt(1), salt="x")
    home = world.run(prompt(1), salt="y")
    assert world.run(prompt(1, 60), salt="y") == home


def test_a_user_stays_where_the_prompt_does_not_say_it() -> None:
    world = World()
    home = world.run(prompt(1), user="ada")
    world.run(prompt(2), user="bob")
    assert world.run(prompt(3), user="ada") == home


def test_the_last_token_is_never_known() -> None:
    assert len(prompt_digests(list(range(PAGE)), PAGE)) == 0
    assert len(prompt_digests(list(range(PAGE + 1)), PAGE)) == 1


def test_a_digest_stands_for_everything_before_it() -> None:
    one, other = prompt_digests(prompt(1), PAGE), prompt_digests(prompt(2), PAGE)
    assert not set(one) & set(other)
    assert prompt_digests(prompt(1, 60), PAGE)[: len(one)] == one


def test_a_replica_is_remembered_for_no_more_than_it_holds() -> None:
    world = World(n_pages=10)
    home = world.run(prompt(1), "a")
    assert home == A
    world.run(prompt(2), "a")  # ten more pages: the first ones are forgotten
    assert world.run(prompt(1)) != A
    assert world.run(prompt(2)) == A


def test_a_new_engine_knows_nothing() -> None:
    world = World()
    assert world.run(prompt(1), "a") == A
    world.chooser.introduce(A, 8, 64, PAGE)
    assert world.run(prompt(1)) == B


def test_who_has_no_engine_comes_last() -> None:
    world = World()
    assert world.run(prompt(1), "a") == A
    world.chooser.dismiss(A)
    assert [world.place(prompt(1))[0] for _ in range(4)].count(A) == 0
    assert world.place(prompt(1), "a")[0] == A


def test_who_says_nothing_is_passed_by_while_another_speaks() -> None:
    world = World(n_slots=2)
    assert world.run(prompt(1), "a") == A
    world.chooser.silent = frozenset(A)
    assert [world.place(prompt(1))[0] for _ in range(6)].count(A) == 0, "also where it knows the prompt, others full"
    assert world.place(prompt(1), "a")[0] == A
    world.chooser.silent = frozenset()
    assert world.place(prompt(1))[0] == A


def test_sequences_count_not_requests() -> None:
    world = World()
    first, _ = world.place(prompt(1), n=4)
    rest = [world.place(prompt(10 + number))[0] for number in range(6)]
    assert first not in rest
    assert world.chooser.n_open(first) == 4


def test_what_has_ended_weighs_nothing_and_moves_are_counted_once() -> None:
    world = World()
    _, name = world.place(prompt(1), "a")
    world.chooser.placed(name, B)
    world.chooser.placed(name, B)
    assert (world.chooser.n_open(A), world.chooser.n_open(B), world.chooser.replica_of(name)) == (0, 1, B)
    world.chooser.done(name)
    world.chooser.done(name)
    assert (world.chooser.n_open(B), world.chooser.replica_of(name)) == (0, "")


@pytest.mark.parametrize("known", [True, False])
def test_an_unknown_request_is_ranked_all_the_same(known: bool) -> None:
    chooser = Chooser()
    if known:
        chooser.introduce(A, 1, 1, PAGE)
    assert sorted(chooser.rank("?", [B, A])) == [A, B]
    assert chooser.rank("?", [B, A])[0] == (A if known else B)


def test_a_server_and_its_router_share_a_chooser() -> None:
    chooser = chooser_of("x")
    assert chooser_of("x") is chooser
    assert chooser_of("y") is not chooser


# ---- what replicas say ------------------------------------------------------------------------------------------


class Saying:
    """A replica that says what it holds: updates as an engine makes them, of prompts given here."""

    def __init__(self, *choosers: Chooser, name: str = A) -> None:
        self._choosers, self._name, self._number = choosers, name, 0

    def say(self, added: list[int] = [], removed: list[int] = [], n_left: int = 0, salt: str = "") -> None:  # noqa: B006
        joined = [b"".join(prompt_digests([*tokens, 0], PAGE, salt)) for tokens in (removed, added)]
        for chooser in self._choosers:
            chooser.hear(self._name, PrefixUpdate(self._number, *joined, n_left))
        self._number += 1

    def begin_anew(self) -> None:
        self._number = 0


def test_an_eviction_is_noticed() -> None:
    world = World()
    saying = Saying(world.chooser)
    saying.say()
    assert world.run(prompt(1), "a") == A
    saying.say(added=prompt(1))
    assert world.run(prompt(1)) == A
    saying.say(removed=prompt(1))
    assert world.run(prompt(1)) != A, "what it has evicted draws nobody"


def test_what_was_sent_counts_until_it_was_said_or_not_kept() -> None:
    world = World()
    saying = Saying(world.chooser)
    saying.say()
    _, name = world.place(prompt(1), "a")
    saying.say()
    assert world.run(prompt(1)) == A, "it is still computed"
    world.chooser.done(name)
    assert world.run(prompt(1)) == A, "nothing was said since it ended"
    saying.say(n_left=3)
    assert world.run(prompt(1)) == A, "not all was said"
    saying.say()
    assert world.run(prompt(1)) != A, "it was not kept"


def test_what_two_requests_share_counts_while_one_is_open() -> None:
    world = World()
    saying = Saying(world.chooser)
    saying.say()
    _, first = world.place(prompt(1), "a")
    _, second = world.place(prompt(1), "a")
    world.chooser.done(second)
    saying.say()
    assert world.run(prompt(1)) == A
    world.chooser.done(first)
    saying.say()
    assert world.run(prompt(1)) != A


def test_a_gap_is_asked_about_and_closed() -> None:
    world = World()
    saying = Saying(world.chooser)
    assert world.chooser.unknown() == [A, B, C]
    saying.say(added=prompt(1))
    assert world.chooser.unknown() == [B, C]
    saying._number += 1
    saying.say(added=prompt(2))
    assert world.chooser.unknown() == [A, B, C] and world.run(prompt(1)) == A, "the old picture holds meanwhile"
    saying.say(added=prompt(3))
    assert not world.chooser._holdings[A].n_known(prompt_digests(prompt(3), PAGE)), "an update by itself is of no use"
    saying.begin_anew()
    saying.say(added=prompt(2), n_left=1)
    saying.say(added=prompt(3))
    assert world.chooser.unknown() == [B, C]
    assert [world.run(prompt(number)) for number in (2, 3)] == [A, A] and world.run(prompt(1)) != A
    stats = world.chooser.stats()
    assert (stats.pictures, stats.gaps) == (2, 1)


def test_a_second_endpoint_knows_what_the_first_has_sent() -> None:
    one, other = World(), World()
    saying = Saying(one.chooser, other.chooser, name=B)
    saying.say()
    assert one.run(prompt(1), "b") == B
    saying.say(added=prompt(1))
    assert other.run(prompt(1)) == B
    restarted = World()
    later = Saying(restarted.chooser, name=B)
    later.say(added=prompt(1))
    assert restarted.run(prompt(1)) == B, "nor does one that comes later begin with nothing"


def test_more_than_a_replica_has_pages_is_never_remembered() -> None:
    world = World(n_pages=30)
    saying = Saying(world.chooser)
    for first in range(20):
        saying.say(added=prompt(first))  # ten pages each, and none is ever removed
        for _ in range(3):
            world.run(prompt(100 + first), "a")
    holdings = world.chooser._holdings[A]
    assert len(holdings._held) == 30 and len(holdings._sent) <= 30
    saying.say()
    assert not holdings._sent and not holdings._ended, "and nothing of requests that have ended"


def test_nothing_is_kept_of_requests_of_a_replica_that_says_nothing() -> None:
    world = World(n_pages=30)
    saying = Saying(world.chooser)
    saying.say()
    saying._number += 1
    saying.say()
    for number in range(50):
        world.run(prompt(number), "a")
    holdings = world.chooser._holdings[A]
    assert not holdings._ended and len(holdings._sent) <= 30


@pytest.mark.parametrize(("deterministic", "apart"), [(False, False), (True, True), (True, False), (False, True)])
def test_salts_are_those_of_the_tree(deterministic: bool, apart: bool) -> None:
    world = World()
    for name in (A, B, C):
        world.chooser.introduce(name, 8, 64, PAGE, deterministic_apart=apart)
    one = request(prompt(1), salt="s", content="00ff")
    one.params.deterministic = deterministic
    salt = salt_of(one, apart=apart and deterministic)
    saying = Saying(world.chooser, name=C)
    saying.say(added=prompt(1), salt=salt)
    world.chooser.expect("x", one)
    assert world.chooser.rank("x", [A, B, C])[0] == C
    other = request(prompt(1), salt="t", content="00ff")
    world.chooser.expect("y", other)
    assert world.chooser.rank("y", [A, B, C])[0] == A


def test_what_was_expected_is_compared_with_what_was_found() -> None:
    world = World()
    saying = Saying(world.chooser)
    saying.say(added=prompt(1))
    for n_found in (40, 16, 0):
        _, name = world.place(prompt(1), "a")
        world.chooser.found(name, n_found)
        world.chooser.found(name, n_found)
        world.chooser.done(name)
    stats = world.chooser.stats()
    assert (stats.expected_tokens, stats.found_tokens, stats.missed_tokens) == (120, 56, 64)
    (facts,) = (one for one in stats.replicas if one.name == A)
    assert (facts.prefix_pages, facts.coming_pages, facts.is_known, facts.n_open) == (10, 0, True, 0)
