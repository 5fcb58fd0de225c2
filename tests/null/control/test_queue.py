"""The waiting queue: order, lazy removal, bounded size."""

from __future__ import annotations

import pytest

from quire.control.queue import WaitQueue
from quire.control.seq import InvariantError, Seq, SeqState
from quire.control.slot_params import slot_params
from quire.core.request import Request
from quire.core.sampling import SamplingParams


def seq(*key: int) -> Seq:
    request = Request(request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(), max_tokens=2, seed=0)
    return Seq(request, 0, (key[0], key[1], 0), slot_params(request, 0))


def test_order_is_priority_then_arrival() -> None:
    queue = WaitQueue()
    seqs = [seq(1, 1), seq(0, 3), seq(0, 2), seq(1, 0)]
    for one in seqs:
        queue.push(one)
    assert [queue.pop().key[:2] for _ in range(4)] == [(0, 2), (0, 3), (1, 0), (1, 1)]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_ended_ones_are_skipped_and_swept() -> None:
    queue = WaitQueue()
    seqs = [seq(0, i) for i in range(1000)]
    for one in seqs:
        queue.push(one)
    for one in seqs[:-1]:
        one.change(SeqState.ENDED)
        queue.forget()
    assert len(queue) == 1 and queue._n_entries < 100
    assert queue.pop() is seqs[-1]


def test_only_legal_changes_of_state() -> None:
    one = seq(0, 0)
    one.change(SeqState.ENDED)
    for state in SeqState:
        with pytest.raises(InvariantError):
            one.change(state)


def test_lengths_are_checked_when_they_change() -> None:
    one = seq(0, 0)
    one.tables, one.held_from, one.room = [[1]], [0], 4
    one.enter(0, 0, [])
    one.plan(3, step=0)
    with pytest.raises(InvariantError, match="limit 3"):
        one.plan(1, step=1)
