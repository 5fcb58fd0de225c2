"""Adapters by name over a reader that is made up: what the host keeps, who waits, and thousands that come and go."""

from __future__ import annotations

import random
import time

import pytest

from quire.core.errors import ConfigError, InvalidParameter, LoadError, RequestError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.adapters import AdapterRegistry


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
        with pytest.raises(RequestError, match="no adapter is loaded"):
            registry.admit(request(name))
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
    with pytest.raises(RequestError, match="all 2 adapters"):
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
