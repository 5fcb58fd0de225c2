"""The engine's link to a process of matchers: what every sequence in it has said, so that another process can take over
when this one has to be ended.

Owns these sequences' tokens, and who is to blame for an end. Does not own which sequence is in which process nor the
memory of masks (`links.py`).
Invariants: a matcher has taken exactly the tokens that were committed for its sequence; a sequence whose matcher ends
the process fails alone; the others notice nothing but time.
"""

from __future__ import annotations

import array
import dataclasses
import logging
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from quire.core.errors import EngineError
from quire.engine.grammars.processes import GrammarProcesses, hear
from quire.engine.grammars.wire import (
    MANY_CORES,
    MARKS,
    MATCHERS,
    REPEATED_TOKENS,
    REPEATS,
    SPIN_S_ON_MANY_CORES,
    Begin,
    Begun,
    Channel,
    Died,
    Nudge,
    Turn,
    Turned,
    encode,
    shared_bytes,
)
from quire.text.leading import LeadBound
from quire.text.matchers import MANY, TOO_SLOW, End, failed

logger = logging.getLogger("quire.engine")

SLICE_S: Final = 0.25
"""`on_wait` is called this often."""
SPIN_S: Final = SPIN_S_ON_MANY_CORES if (os.cpu_count() or 1) >= MANY_CORES else 0.0
SILENCE_S: Final = 60.0
"""A process that does not answer for so long is stopped, or starved beyond use: another takes its place."""
MAX_BLAMELESS: Final = 3
"""Ends in a row of which nobody is to blame, after which all sequences fail."""
MOST_UNFOLLOWED: Final = 256
"""Grammars of which it is remembered that their drafts are not to be followed."""
CRASH_TEXT: Final = "the output cannot go on: this grammar has ended the process that follows it"


@dataclasses.dataclass(slots=True)
class _Group:
    """The sequences of one request."""

    handles: list[int]
    grammar: str
    compile_s: float
    lead: LeadBound | None
    is_begun: bool = False
    is_followed: bool = True
    """Whether masks are made along its drafts: not once that has ended the process."""


@dataclasses.dataclass(slots=True)
class _Seq:
    group: _Group
    tokens: list[int] = dataclasses.field(default_factory=list)


class MatcherLink:
    """See the module. For the engine's own thread."""

    def __init__(self, processes: GrammarProcesses, masks: int, unfollowed: dict[str, None]) -> None:
        """masks: the descriptor of the memory that masks are written to. unfollowed: grammars whose drafts have ended a
        process; of all links."""
        self._processes, self._masks, self._unfollowed = processes, masks, unfollowed
        self._descriptor = -1
        self._share()
        self._child: Channel | None = None
        self._turn: Turn | None = None
        """That was asked for, until its answer is taken."""
        self._turned: Turned | None = None
        self._repeatable: Turn | None = None
        """The newest that the process was sent, if it can be repeated."""
        self._n_repeats, self._repeats = 0, False
        """In this process, and whether an answer to the newest is to come."""
        self._seqs: dict[int, _Seq] = {}
        self._dropped: list[int] = []
        """Sequences that the process may forget."""
        self._news: list[Begun] = []
        self._ends: list[End] = []
        """Of sequences that went down with the process, for the next turn to return."""
        self._suspect = 0
        """What was worked on when the process was killed, perhaps from outside."""
        self.on_wait: Callable[[], None] | None = None
        """Called now and then while a step waits for its masks."""
        self.on_blame: Callable[[int], None] | None = None
        """Called with a handle whose matcher has ended the process."""

    def __len__(self) -> int:
        """Sequences."""
        return len(self._seqs)

    def begin(self, handles: list[int], grammar: str, compile_s: float, lead: LeadBound | None = None) -> None:
        """The sequences of a request are going to need masks; `begun` says when they can have them."""
        unfollowed = self._unfollowed
        group = _Group(handles, grammar, compile_s, lead, is_followed=grammar not in unfollowed)
        for handle in handles:
            self._seqs[handle] = _Seq(group)
        self._post(Begin(handles, grammar, compile_s, [[] for _ in handles], lead))

    @property
    def is_beginning(self) -> bool:
        """Whether the grammar of a sequence is not ready."""
        return any(not one.group.is_begun for one in self._seqs.values())

    def begun(self, wait_s: float) -> list[Begun]:
        """What has begun since the last call; waits for the first up to `wait_s`."""
        if not self._news and self._child is not None and self.is_beginning:
            try:
                while self._child.waits(0.0 if self._news else wait_s):
                    report = self._hear()
                    if report is None:
                        break
                    self._note(report)
            except _Ended as ended:
                self._recover(ended)
        news, self._news = self._news, []
        return news

    def drop(self, handles: Sequence[int]) -> None:
        """Forget sequences; one that is not known is ignored."""
        self._dropped += [handle for handle in handles if self._seqs.pop(handle, None) is not None]

    def ask(self, turn: Turn) -> None:
        """Have sequences moved, and masks made: see `Turn`."""
        turn.moves = [move for move in turn.moves if move[0] in self._seqs]  # some may have ended with a process
        for handle, tokens in turn.moves:
            self._seqs[handle].tokens += tokens
        turn.dropped, self._dropped = self._dropped, []
        turn.unfollowed = self._alone(turn.rows)
        self._turn = turn
        self._repeatable = None if turn.drafts or turn.most_foretold else turn
        self._post(turn)

    @property
    def may_repeat(self) -> bool:
        """Whether the newest turn may be asked for again, without a message."""
        return self._repeatable is not None and self._turn is None and not self._dropped

    def repeat(self, tokens: Sequence[int]) -> None:
        """That, with each row's sequence moved by one token. Only if `may_repeat`."""
        turn, child = self._repeatable, self._child
        assert turn is not None and child is not None
        for handle, token in zip(turn.rows, tokens, strict=True):
            self._seqs[handle].tokens.append(token)
        self._turn, self._repeats, self._n_repeats = turn, True, self._n_repeats + 1
        self._marks[REPEATED_TOKENS : REPEATED_TOKENS + len(tokens)] = array.array("q", tokens)
        self._marks[REPEATS[0]] = self._n_repeats
        try:
            child.send_silently()
        except OSError:
            self._recover(_Ended(self._read_end()))

    def answer(self) -> Turned:
        """Wait for what was asked: what ended by it, and what is foretold. The masks are there."""
        n_ends, most = 0, 2 * len(self._seqs) + MAX_BLAMELESS + 1
        while self._turned is None:
            try:
                self._note(self._wait())
            except _Ended as ended:
                n_ends += 1
                if n_ends == most:
                    self._turn = None
                    raise EngineError("a process of matchers cannot be kept alive; see the log") from None
                self._recover(ended)
        turned, self._turn, self._turned = self._turned, None, None
        turned.ends, self._ends = self._ends + turned.ends, []
        self.drop([end.handle for end in turned.ends])
        return turned

    def _alone(self, rows: list[int]) -> list[int]:
        """Those along whose drafts nothing is to be done."""
        return [handle for handle in rows if handle in self._seqs and not self._seqs[handle].group.is_followed]

    def close(self) -> None:
        """End the process and forget everything."""
        self._disconnect()
        self._seqs.clear()
        os.close(self._descriptor)

    # ---- the process

    def _share(self) -> None:
        """Memory for the next process: one that was given up may still write into its own."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        n_bytes = shared_bytes(self._processes.settings.n_rows)
        self._descriptor = os.memfd_create("quire-marks")
        os.ftruncate(self._descriptor, n_bytes)
        self._memory = mmap.mmap(self._descriptor, n_bytes)
        self._marks = memoryview(self._memory).cast("q")

    def _post(self, order: Begin | Turn) -> None:
        try:
            self._send(order)
        except _Ended as ended:
            self._recover(ended)

    def _send(self, order: Begin | Turn) -> None:
        if self._child is None:
            self._share()
            self._n_repeats = 0
            self._child = self._processes.fork(MATCHERS, (self._descriptor, self._masks))
            self._child.attach(self._marks, is_engine=True)
        try:
            self._child.send(encode(order))
        except OSError:
            raise _Ended(self._read_end()) from None

    def _hear(self) -> Begun | Turned | Nudge | None:
        """None: there is nothing to be heard, yet."""
        assert self._child is not None
        if self._repeats and self._marks[REPEATS[1]] == self._n_repeats:
            self._child.take_silently()
            return Turned([])
        if not self._child.has_message():
            return None
        report = hear(self._child)
        if isinstance(report, Begun | Turned | Nudge):
            return report
        raise _Ended(report if isinstance(report, Died) else Died())

    def _read_end(self) -> Died:
        """Of a process that does not read any more."""
        while self._child is not None and self._child.has_message():
            report = hear(self._child)
            if isinstance(report, Died):
                return report
        return Died()

    def _note(self, report: Begun | Turned | Nudge) -> None:
        if isinstance(report, Turned):
            self._turned, self._repeats = report, False
        elif isinstance(report, Begun):
            for handle in report.handles:
                if handle in self._seqs:
                    self._seqs[handle].group.is_begun = True
            self._news.append(report)

    def _wait(self) -> Begun | Turned | Nudge:
        """The next report. Raises _Ended, also when there is none for too long."""
        assert self._child is not None
        deadline_s = time.monotonic() + SILENCE_S
        while True:
            report = self._hear() if self._child.waits(SLICE_S, SPIN_S) else None
            if report is not None:
                return report
            if self.on_wait is not None:
                self.on_wait()
            if time.monotonic() > deadline_s:
                raise _Ended(Died(signal.SIGKILL, f"it did not answer for {SILENCE_S:g} s"))

    def _recover(self, ended: _Ended) -> None:
        """Another process, in which every sequence is where it was; those that cannot go on have ended. What was asked
        for is asked for again."""
        n_blameless, self._repeats, self._repeatable = 0, False, None
        while True:
            lost = self._blamed(ended.died)
            n_blameless = 0 if lost else n_blameless + 1
            logger.warning(
                "a process of matchers has ended (%s); %d sequences move to another, %d cannot go on",
                self._processes.ending(ended.died), len(self._seqs), len(lost),
            )  # fmt: skip
            if n_blameless >= MAX_BLAMELESS:
                lost = list(self._seqs)
            self._fail(lost, ended.died)
            self._disconnect()
            try:
                self._rebuild()
                if self._turn is not None and self._turned is None:
                    self._turn = self._again(self._turn)
                    self._send(self._turn)
                return
            except _Ended as again:
                ended = again

    def _again(self, turn: Turn) -> Turn:
        """The masks of a turn, where all have moved."""
        rows = [handle if handle in self._seqs else 0 for handle in turn.rows]
        return Turn([], rows, turn.lines, turn.drafts, unfollowed=self._alone(rows), one_by_one=True)

    def _blamed(self, died: Died) -> list[int]:
        """The sequences of the request that was worked on, if that is certain. A kill may come from outside, and so may
        an end without a last word, whose first process is gone too: it takes a second one."""
        working, compiling = MARKS.unpack_from(self._memory)
        if working == MANY or (working and compiling):
            return []
        if working < MANY:  # a draft is nobody's word: its sequence goes on without
            self._stop_following(MANY - working)
            return []
        handle = working or compiling
        if (died.signal == signal.SIGKILL or died == Died()) and handle != self._suspect:
            self._suspect = handle
            return []
        found = self._seqs.get(handle)
        return [] if found is None else [one for one in found.group.handles if one in self._seqs]

    def _stop_following(self, handle: int) -> None:
        found = self._seqs.get(handle)
        if found is not None:
            found.group.is_followed = False
            self._unfollowed[found.group.grammar] = None
            if len(self._unfollowed) > MOST_UNFOLLOWED:
                del self._unfollowed[next(iter(self._unfollowed))]

    def _fail(self, handles: list[int], died: Died) -> None:
        if not handles:
            return
        if self.on_blame is not None:
            self.on_blame(handles[0])
        failure = TOO_SLOW if died.signal == signal.SIGPROF else failed(CRASH_TEXT)
        ends = [End(one, failure) for one in handles]
        groups = {id(self._seqs[one].group): self._seqs[one].group for one in handles}
        self.drop(handles)
        for group in groups.values():
            if not group.is_begun:
                self._news.append(Begun(group.handles, ends))
        self._ends += ends

    def _rebuild(self) -> None:
        """Begin every request again, one after the other, so that it is plain which one ends the process."""
        self._dropped.clear()
        groups = {id(one.group): one.group for one in self._seqs.values()}
        for group in groups.values():
            group.handles = [handle for handle in group.handles if handle in self._seqs]
            tokens = [self._seqs[handle].tokens for handle in group.handles]
            self._send(Begin(group.handles, group.grammar, group.compile_s, tokens, group.lead))
            report = self._wait()
            if isinstance(report, Begun):
                if group.is_begun:
                    self._ends += report.ends
                else:
                    self._note(report)

    def _disconnect(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class _Ended(Exception):
    """A process of matchers is gone."""

    def __init__(self, died: Died) -> None:
        super().__init__(died)
        self.died = died
