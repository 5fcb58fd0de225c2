"""Which replica takes a request."""

from __future__ import annotations

import pytest

from quire.core.request import Request, Terms
from quire.core.sampling import SamplingParams
from quire.engine.replicas.chooser import Chooser, chooser_of
from quire.engine.replicas.prefixes import MAX_MARKS, page_marks

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
    assert page_marks(prompt(1), PAGE, "x") != page_marks(prompt(1), PAGE)
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
    assert len(page_marks(list(range(PAGE)), PAGE)) == 0
    assert len(page_marks(list(range(PAGE + 1)), PAGE)) == 1
    assert len(page_marks([0] * (PAGE * (MAX_MARKS + 9)), PAGE)) == MAX_MARKS


def test_a_mark_stands_for_everything_before_it() -> None:
    one, other = page_marks(prompt(1), PAGE), page_marks(prompt(2), PAGE)
    assert not set(one) & set(other)
    assert page_marks(prompt(1, 60), PAGE)[: len(one)] == one


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
