"""Turns that are as the one before but for their tokens, asked for silently: masks are those of messages."""

from __future__ import annotations

import os
import pathlib
import queue
import random
import signal
import socket
import threading
from typing import Any

import numpy as np
import psutil
import pytest

import quire
from quire.engine.grammars import link, links
from quire.engine.grammars.link import MatcherLink
from quire.engine.grammars.links import MatcherLinks
from quire.engine.grammars.matching import MatcherProcess
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.wire import (
    BELLS,
    REPEATED_TOKENS,
    REPEATS,
    Channel,
    Died,
    GrammarSettings,
    Turn,
    Turned,
    decode_order,
    shared_bytes,
)

WIDTH = 4096
FOLDER = pathlib.Path(quire.__file__).parent / "_models" / "demo"
ENDS = [2, 0]
N_STEPS = 12
N_SEQS = 7


class Steps:
    """Sequences of which each says a token that its mask allows; what masks there were."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self.links = MatcherLinks(processes)
        self.rows = list(range(1, 1 + N_SEQS))
        for handle in self.rows:  # the sixth ends in the middle
            regex = "[a-f]{4}" if handle == 6 else f"({'abcdefg'[handle - 1]}|[h-m ]|x[y-z])+"
            self.links.begin([handle], f"start: /{regex}/", 0.0)
        waiting = set(self.rows)
        while waiting:
            waiting -= {handle for one in self.links.begun(5.0) for handle in one.handles}
        self._rng, self.masks = random.Random(3), list[bytes]()
        self._said: list[tuple[int, list[int]]] = []

    def ask(self) -> None:
        self.links.ask(self._said, list(self.rows))

    def take(self) -> None:
        made = self.links.answer()
        self.masks.append(made.bits.tobytes())
        self._said = []
        for row, handle in enumerate(list(self.rows)):
            allowed = np.flatnonzero(np.unpackbits(made.bits[row].view(np.uint8), bitorder="little")).tolist()
            self._said.append((handle, [self._rng.choice([one for one in allowed if one not in ENDS] or ENDS)]))
        ended = {end.handle for end in made.ends}
        self.rows = [handle for handle in self.rows if handle not in ended]
        self._said = [one for one in self._said if one[0] not in ended]


@pytest.fixture(scope="module")
def processes() -> GrammarProcesses:
    settings = GrammarSettings(str(FOLDER), WIDTH, ENDS, WIDTH // 32, 64, 3, 5.0, 1 << 30)
    return GrammarProcesses(settings)


@pytest.fixture(scope="module")
def expected(processes: GrammarProcesses) -> list[bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "REPEATS", False)
        return said(processes, patch)[0]


def said(processes: GrammarProcesses, patch: pytest.MonkeyPatch, killed: int = -1) -> tuple[list[bytes], list[str]]:
    """Masks, and how each process was asked. killed: the step in which a process is, while it works."""
    asked: list[str] = []
    patch.setattr(links, "FEW", 2)

    def note(name: str) -> None:
        real = getattr(MatcherLink, name)

        def noted(self: MatcherLink, given: Any) -> None:
            asked.append(name)
            real(self, given)

        patch.setattr(MatcherLink, name, noted)

    note("ask")
    note("repeat")
    steps = Steps(processes)
    for number in range(N_STEPS):
        steps.ask()
        if number == killed:
            assert processes._process is not None
            for child in psutil.Process(processes._process.pid).children():
                os.kill(child.pid, signal.SIGKILL)
        steps.take()
    steps.links.close()
    assert len(steps.rows) == N_SEQS - 1
    return steps.masks, asked


@pytest.mark.parametrize("spin_s", [0.0, 0.02])
@pytest.mark.parametrize("killed", [-1, 0, 3, 4, 9])
def test_masks_are_those_of_messages(
    processes: GrammarProcesses, expected: list[bytes], monkeypatch: pytest.MonkeyPatch, spin_s: float, killed: int
) -> None:
    monkeypatch.setattr(links, "REPEATS", True)
    monkeypatch.setattr(link, "SPIN_S", spin_s)
    masks, asked = said(processes, monkeypatch, killed)
    assert masks == expected
    # Three processes are told the first turn, that behind the end of a sequence, and that behind their own end.
    assert asked.count("ask") <= (6 if killed < 0 else 12) and asked.count("ask") + asked.count("repeat") == 3 * N_STEPS


def test_a_silent_message_wakes_who_sleeps() -> None:
    bells = memoryview(bytearray(shared_bytes(0))).cast("q")
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.attach(bells, is_engine=True)
    theirs.attach(bells, is_engine=False)
    assert not theirs.waits(0.0)
    ours.send_silently()
    assert theirs.waits(0.0) and not theirs._poll.poll(0), "who is awake needs no message"
    theirs.take_silently()
    assert not theirs.waits(0.01)
    theirs._bells[4 + 1] = 1  # type: ignore[index]
    ours.send_silently()
    assert theirs.waits(60.0) and decode_order(theirs.receive()) and theirs.waits(0.0)
    theirs.take_silently()
    assert theirs._n_received == bells[BELLS[0]] == 3 and not theirs.waits(0.0)
    ours.close()
    theirs.close()


def test_those_that_begin_together_are_told_together(
    processes: GrammarProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three processes, each with grammars of its own to compile."""
    monkeypatch.setattr(links, "FEW", 2)
    monkeypatch.setattr(links, "GATHER_S", 60.0)
    made = MatcherLinks(processes)
    for handle in range(1, 8):
        made.begin([handle], f"start: /together {handle}[a-z]+/", 0.0)
    assert {one for begun in made.begun(60.0) for one in begun.handles} == set(range(1, 8))
    made.close()


def test_no_wait_is_longer_than_asked_for() -> None:
    """By what it asks the system for; one that ends never is looked into after a while, once."""

    class Poll:
        def poll(self, timeout_ms: float | None) -> list[int]:
            asked.append(timeout_ms)
            return []

    bells = memoryview(bytearray(shared_bytes(0))).cast("q")
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.attach(bells, is_engine=True)
    for timeout_ms, expected in ((None, [5, None]), (250, [5, 245]), (5, [5]), (0.4, [0.4])):
        asked: list[float | None] = []
        assert not ours.sleep(Poll(), timeout_ms)  # type: ignore[arg-type]
        assert asked == expected and bells[4] == 0
    bells[3] = 1  # a silent message came just before
    asked = []
    assert ours.sleep(Poll(), 250) and not asked  # type: ignore[arg-type]
    ours.close()
    theirs.close()


def test_a_turn_that_comes_between_two_looks_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was woken by a compiled grammar looks for what is silent, then for a message."""
    marks = memoryview(bytearray(shared_bytes(8))).cast("q")
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.attach(marks, is_engine=True)
    theirs.attach(marks, is_engine=False)
    process = MatcherProcess.__new__(MatcherProcess)
    process._connection, process._marks, process._n_repeats = theirs, marks, 0
    process._repeated, process._compiled, process._compiling = Turn([], [1], [0]), queue.SimpleQueue(), {}
    process._wake_read, process._wake_write = os.pipe()
    look, asked = theirs.has_message, threading.Event()

    def has_message() -> bool:
        if not asked.is_set():
            asked.set()
            marks[REPEATED_TOKENS], marks[REPEATS[0]] = 5, 1
            ours.send_silently()
        return look()

    monkeypatch.setattr(theirs, "has_message", has_message)
    monkeypatch.setattr(MatcherProcess, "_rest", lambda self: None)
    monkeypatch.setattr(MatcherProcess, "_take_compiled", lambda self: self._compiled.get())
    monkeypatch.setattr(MatcherProcess, "_turn", lambda self, turn: Turned([]))
    serving = threading.Thread(target=process._serve, daemon=True)
    serving.start()
    process._compiled.put(object())  # type: ignore[arg-type]
    os.write(process._wake_write, b"x")
    assert ours.waits(10.0) and asked.is_set() and marks[REPEATS[1]] == 1
    while ours.has_message():  # a nudge
        ours.receive()
    ours.close()
    serving.join(10)
    assert not serving.is_alive()


def test_what_a_lost_process_still_writes_is_not_seen(processes: GrammarProcesses) -> None:
    made = MatcherLinks(processes)
    made.begin([1], "start: /a+/", 0.0)
    assert made.begun(60.0)
    one = made._homes[1]
    before = one._marks
    one._recover(link._Ended(Died(signal.SIGKILL)))
    before[BELLS[1]] += 1
    assert one._child is not None and not one._child.waits(0.0)
    made.close()
