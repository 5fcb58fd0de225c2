"""The ring: messages of any length arrive whole and in order, at every reader; one that is missing is noticed."""

from __future__ import annotations

import concurrent.futures
import os
import random

import pytest
from worker_rank import plans

from quire.core.errors import EngineError
from quire.core.plan import SlotOpen, StepMasks, StepPlan
from quire.engine.ranks.ring import RING_BYTES, RankMemory, RingReader, RingWriter, make_memory
from quire.engine.ranks.wire import SleepRanks, Stop, decode, encode


def ends(n_ranks: int) -> tuple[RingWriter, list[RingReader]]:
    fd = make_memory(n_ranks)
    bells = [os.eventfd(0) for _ in range(1, n_ranks)]
    memory = RankMemory(fd, n_ranks)
    return RingWriter(memory, bells, lambda: None), [
        RingReader(RankMemory(fd, n_ranks), rank, bell) for rank, bell in enumerate(bells, 1)
    ]


def test_messages_arrive_whole_and_in_order() -> None:
    writer, readers = ends(4)
    source = random.Random(0)
    sizes = [0, 1, RING_BYTES, 2 * RING_BYTES + 5, *(source.randrange(RING_BYTES // 3) for _ in range(40))]
    messages = [source.randbytes(size) for size in sizes]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        read = [pool.submit(lambda reader: [reader.get() for _ in messages], reader) for reader in readers]
        for message in messages:
            writer.put(message)
        assert all(one.result(60) == messages for one in read)


def test_a_full_ring_asks_whether_anybody_reads() -> None:
    class Gone(Exception):
        pass

    def check() -> None:
        raise Gone

    writer, _ = ends(2)
    writer._check = check
    with pytest.raises(Gone):
        writer.put(bytes(RING_BYTES))


def test_a_lost_message_is_noticed() -> None:
    writer, (reader,) = ends(2)
    writer.put(b"one")
    assert reader.get() == b"one"
    writer._number += 1
    writer.put(b"three")
    with pytest.raises(EngineError, match="message 1 was expected and number 2 came"):
        reader.get()


def test_what_is_said_is_heard() -> None:
    long = StepPlan(5, plans()[0].spans, opened=[SlotOpen(0, list(range(1000)), 1000, plans()[0].opened[0].params)])
    for said in (*plans(), long, SleepRanks(2), Stop()):
        assert decode(encode(said)) == said
    masks = decode(encode(StepMasks(7, memoryview(b"12345678"))))
    assert isinstance(masks, StepMasks) and masks.step == 7 and bytes(masks.bits) == b"12345678"
