"""Adapters by name over a reader that is made up: what the host keeps, who waits, and thousands that come and go."""

from __future__ import annotations

import pathlib
import random
import time

import pytest

from quire.config.engine import EngineConfig
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError, InvalidParameter, LoadError, RequestError, RequestExpired, error_of
from quire.core.events import EndKind
from quire.core.failure import Code
from quire.core.request import Request, Terms
from quire.core.sampling import SamplingParams
from quire.engine.adapters import AdapterRegistry, registry_of
from quire.engine.executors.executor import RanksLost
from quire.engine.ranks.adapters import AdaptersOfRanks
from quire.engine.ranks.wire import ReadAdapter
from quire.serve.http.refusal import refusal_of

FULL = r"all 2 adapters that the host keeps are in use or being read: .* --max-cpu-loras"


class Reader:
    """A folder's content is what `content` says, or its name; 'bad' cannot be read."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.content: dict[str, str] = {}
        self.n_reads = 0

    def read_adapter(self, path: str, root: str) -> tuple[str, int, str]:
        self.n_reads += 1
        if path == "bad":
            raise LoadError("no good")
        found = self.content.get(path, path)
        return found, 8, f"weights of {found}"

    def keep_adapter(self, content_id: str, kept: str) -> None:
        assert kept == f"weights of {content_id}"
        self.kept.add(content_id)

    def drop_adapter(self, content_id: str) -> None:
        self.kept.remove(content_id)


def request(name: str, request_id: str = "r") -> Request:
    made = Request(request_id=request_id, prompt_token_ids=[1], params=SamplingParams(), max_tokens=1, seed=0)
    made.adapter = name
    return made


def ready(registry: AdapterRegistry) -> list[tuple[str, str]]:
    """(request, its error) of those that wait, within a second."""
    end_s, found = time.monotonic() + 1, []
    while not found and time.monotonic() < end_s:
        found = registry.ready(0.05)
    return [(one.request_id, "" if error is None else error.message) for one, error in found]


def test_names() -> None:
    registry = AdapterRegistry(Reader(), 4)
    assert registry.load("x", "folder").content_id == "folder"
    with pytest.raises(InvalidParameter, match="load_inplace"):
        registry.load("x", "other")
    first = request("x")
    assert registry.admit(first) and first.content_id == "folder"
    registry.load("x", "other", in_place=True)
    second = request("x")
    assert registry.admit(second) and (first.content_id, second.content_id) == ("folder", "other")
    with pytest.raises(LoadError):
        registry.load("y", "bad")
    for name in ("", " x", "a\nb", "x" * 257):
        with pytest.raises(InvalidParameter, match="lora_name"):
            registry.load(name, "folder")
    registry.unload("x")
    for name in ("x", "y"):
        with pytest.raises(RequestError, match="no adapter is loaded") as caught:
            registry.admit(request(name))
        refusal = refusal_of(error_of(caught.value.failure()))
        assert refusal.status == 404 and refusal.code == "model_not_found", "as where nobody had the name before"
        with pytest.raises(RequestError, match="no adapter is loaded"):
            registry.unload(name)
    plain = request("")
    plain.content_id = "what a client claims"
    assert registry.admit(plain) and plain.content_id == ""
    with pytest.raises(ConfigError, match="enable-lora"):
        AdapterRegistry().load("x", "folder")


def test_who_waits() -> None:
    reader, used = Reader(), set[str]()
    registry = AdapterRegistry(reader, 2, lambda: used)
    for name in "abc":
        registry.load(name, f"/{name}")
    assert reader.kept == {"/b", "/c"}
    used |= reader.kept
    assert not registry.admit(request("a", "1")) and registry.n_waiting == 1
    assert registry.ready(0.01) == [], "open requests have both"
    with pytest.raises(RequestError, match=FULL):
        registry.load("d", "/d")
    used.remove("/b")
    assert ready(registry) == [("1", "")] and reader.kept == {"/a", "/c"}
    used.clear()
    reader.content["/b"] = "changed"
    registry.admit(request("b", "2"))
    registry.admit(request("b", "3"))
    assert ready(registry) == [
        (one, "the adapter's folder has changed since it was loaded: load it again") for one in "23"
    ]
    registry.admit(request("a", "4"))
    registry.drop("4")
    assert registry.n_waiting == 0


def test_thousands_come_and_go() -> None:
    chance, reader, used = random.Random(1), Reader(), dict[str, int]()
    registry = AdapterRegistry(reader, 8, lambda: used)
    for number in range(10_000):
        name = f"n{chance.randrange(12)}"
        try:
            if chance.random() < 0.6:
                registry.load(name, f"/{chance.randrange(40)}", in_place=chance.random() < 0.5)
            else:
                registry.unload(name)
        except (InvalidParameter, RequestError):
            continue
        assert len(reader.kept) <= 8
        assert reader.kept == set(registry._kept)
        if number % 100 == 0 and registry.facts:
            used = {chance.choice(registry.facts).content_id: 1}
    used.clear()
    for facts in registry.facts:
        registry.unload(facts.name)
    assert not reader.kept and not registry._kept and not registry._readings and registry.n_waiting == 0
    assert reader.n_reads > 3000


def waiting(clock: VirtualClock, **limits: float) -> tuple[AdapterRegistry, Request]:
    """A request whose adapter has no room on the host, since now."""
    registry = AdapterRegistry(Reader(), 1, lambda: ["/b"], clock)
    registry.load("a", "/a")
    registry.load("b", "/b")
    made = request("a")
    made.terms = Terms(**limits)
    assert not registry.admit(made)
    return registry, made


@pytest.mark.parametrize(
    ("limits", "limit_s", "code"),
    [
        ({"queue_limit_s": 5.0}, 5.0, Code.QUEUE_TIMEOUT),
        ({"time_limit_s": 7.0}, 7.0, Code.REQUEST_TIMEOUT),
        ({"queue_limit_s": 9.0, "time_limit_s": 7.0}, 7.0, Code.REQUEST_TIMEOUT),
    ],
)
def test_a_request_waits_no_longer_than_it_may(limits: dict[str, float], limit_s: float, code: Code) -> None:
    clock = VirtualClock()
    registry, made = waiting(clock, **limits)
    clock.advance(limit_s - 0.5)
    assert registry.ready() == []
    clock.advance(0.5)
    ((late, error),) = registry.ready()
    assert late is made and isinstance(error, RequestExpired) and error.code == code and registry.n_waiting == 0
    assert f"'a' did not come into the host's memory within {limit_s:g} s" in error.message


def test_what_a_request_has_waited_counts_afterwards() -> None:
    clock, used = VirtualClock(), {"/b"}
    registry = AdapterRegistry(Reader(), 1, lambda: used, clock)
    registry.load("a", "/a")
    registry.load("b", "/b")
    made, free = request("a", "1"), request("a", "2")
    made.terms = Terms(queue_limit_s=5.0, time_limit_s=100.0)
    assert not registry.admit(made) and not registry.admit(free)
    clock.advance(3)
    used.clear()
    assert ready(registry) == [("1", ""), ("2", "")]
    assert (made.terms.queue_limit_s, made.terms.time_limit_s) == (2.0, 97.0)
    assert free.terms == Terms(), "without a limit it may wait for ever"


def test_of_two_that_load_one_name_at_once_the_second_is_refused() -> None:
    reader = Reader()
    registry = AdapterRegistry(reader, 4)
    first = registry.begin("x", "/1")
    with pytest.raises(InvalidParameter, match="being loaded"):
        registry.begin("x", "/2")
    third = registry.begin("x", "/3", in_place=True)
    assert registry.finish(first).content_id == "/1" and registry.finish(third).content_id == "/3"
    failing = registry.begin("y", "bad")
    with pytest.raises(LoadError):
        registry.finish(failing)
    assert registry.load("y", "/4").content_id == "/4"


def test_those_that_are_being_loaded_take_room() -> None:
    reader = Reader()
    registry = AdapterRegistry(reader, 2)
    registry.load("x", "/x")
    loadings = [registry.begin(name, f"/{name}") for name in "yz"]
    with pytest.raises(RequestError, match=FULL):
        registry.begin("w", "/w")
    for loading in loadings:
        registry.finish(loading)
    assert reader.kept == {"/y", "/z"}


def test_a_request_for_what_a_name_stood_for_before_is_refused() -> None:
    registry = AdapterRegistry(Reader(), 4)
    registry.load("x", "/1")
    made = request("x")
    made.content_id = "/1"
    assert registry.admit(made)
    registry.load("x", "/2", in_place=True)
    with pytest.raises(RequestError, match="another adapter has the name 'x'"):
        registry.admit(made)


def test_an_engine_that_is_started_again_goes_on_without_what_is_lost() -> None:
    limits = SchedulerConfig(n_pages=8, page_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    reader, scheduler = Reader(), Scheduler(limits, VirtualClock())
    config = EngineConfig(enable_lora=True, device="cpu", lora_modules=["x=bad", "y=/y"])
    with pytest.raises(LoadError):
        registry_of(config, reader, scheduler, list)
    registry = registry_of(config, reader, scheduler, list, is_restart=True)
    assert [facts.name for facts in registry.facts] == ["y"]
    with pytest.raises(RequestError, match=r"'x' is not loaded: .*started again \(no good\): load it again"):
        registry.admit(request("x"))
    registry.load("x", "/x")
    assert registry.admit(request("x"))


def test_an_adapter_that_a_request_is_given_stays_for_it() -> None:
    """Another request waits behind it for the only place."""
    used = {"/c"}
    registry = AdapterRegistry(Reader(), 1, lambda: used, VirtualClock())
    for name in "abc":
        registry.load(name, f"/{name}")
    assert not registry.admit(request("a", "1")) and not registry.admit(request("b", "2"))
    used.clear()
    found = []
    while not found:
        found = registry.ready(1.0)
    assert [one.request_id for one, error in found] == ["1"] and list(registry._kept) == ["/a"]


def test_a_lost_rank_is_no_fault_of_an_adapter() -> None:
    """Nobody is refused for it: the engine ends, and requests run again."""
    loss, reader, used = RanksLost("rank 1 ended with SIGKILL", EndKind.KILLED), Reader(), {"/b"}
    registry = AdapterRegistry(reader, 1, lambda: used, VirtualClock())
    registry.load("a", "/a")
    registry.load("b", "/b")
    assert not registry.admit(request("a"))
    used.clear()

    def lose(path: str, root: str) -> tuple[str, int, str]:
        raise loss

    reader.read_adapter = lose  # type: ignore[method-assign]
    with pytest.raises(RanksLost, match="SIGKILL"):
        ready(registry)
    assert registry.n_waiting == 1, "it is not answered"
    limits = SchedulerConfig(n_pages=8, page_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    config = EngineConfig(enable_lora=True, device="cpu", lora_modules=["x=/x"])
    with pytest.raises(RanksLost, match="SIGKILL"):
        registry_of(config, reader, Scheduler(limits, VirtualClock()), list, is_restart=True)


class EndingRanks:
    """One more, which is told to leave and answers nothing."""

    pids = (1,)

    def __init__(self, meeting_point: str) -> None:
        self.meeting_point, self.said = meeting_point, list[object]()

    def say(self, said: object) -> None:
        self.said.append(said)

    def ends_within(self, seconds: float) -> bool:
        return True


def test_ranks_that_leave_are_lost_to_who_waits_for_them(tmp_path: pathlib.Path) -> None:
    ranks = EndingRanks(str(tmp_path / "meet"))
    with pytest.raises(RanksLost, match="read no adapters any more"):
        AdaptersOfRanks(Reader(), ranks).read_adapter(str(tmp_path), "")  # type: ignore[arg-type]


@pytest.mark.parametrize("has_root", [True, False])
def test_all_ranks_read_the_folder_that_rank_0_has_read(has_root: bool, tmp_path: pathlib.Path) -> None:
    """`link/..` is where the link leads to, not where it lies, in which there is another adapter of that name."""
    for name in ("root/there/below", "root/there/x", "root/x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root/link").symlink_to(tmp_path / "root/there/below")
    (tmp_path / "way").symlink_to(tmp_path / "root")
    path, root = ("link/../x", str(tmp_path / "way")) if has_root else (str(tmp_path / "way/link/../x"), "")
    ranks = EndingRanks(str(tmp_path / "meet"))
    with pytest.raises(RanksLost):
        AdaptersOfRanks(Reader(), ranks).read_adapter(path, root)  # type: ignore[arg-type]
    (order,) = ranks.said
    assert isinstance(order, ReadAdapter) and order.path == str((tmp_path / "root/there/x").resolve())
    assert order.root == (str((tmp_path / "root").resolve()) if has_root else "")
