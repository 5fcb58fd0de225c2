"""Work on texts: in pieces, one large one at a time, and no more of it than is needed to refuse a text."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from typing import Any

import pytest
from serve_fakes import byte_tokenizer

from quire.core.errors import ContextLengthExceeded, QueueFull
from quire.serve.http.bodies import SMALL_BYTES, BodyMemory
from quire.serve.http.threads import LARGE_BYTES, MAX_PENDING, LargeWorkLock, WorkThreads
from quire.serve.openai import prompts
from quire.serve.openai.prompts import SEGMENT_CHARS, check_tokens, decoded, prompts_of

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", ["plain words", "日本語 é 😀 ", "👩‍👩‍👧‍👦", "é́", "a😀"])
def test_texts_are_decoded_in_pieces(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end anywhere, also inside of characters."""
    monkeypatch.setattr(prompts, "DECODED_TOKENS", 17)
    for n in (1, 3, 17, 18, 40, 200):
        ids = (ids_of(text) * 200)[:n]
        assert decoded(TOKENIZER, ids) == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert decoded(TOKENIZER, []) == ""


def test_what_is_no_text_is_decoded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "DECODED_TOKENS", 16)
    draw = random.Random(7)
    for _ in range(50):
        ids = [draw.randrange(256) for _ in range(100)]
        text = decoded(TOKENIZER, ids)
        assert abs(len(text) - len(TOKENIZER.decode(ids, skip_special_tokens=False))) <= 3 * (100 // 16 + 1)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([5] * 2100, "prompt has 2,100 token ids, and 2,048 are the most."),
        (["x"] * 3000, "prompt has 3,000 entries; one request may have 1,024."),
        ([[1]] * 3000, "prompt has 3,000 entries; one request may have 1,024."),
        (["x"] * 1025, "prompt has 1025 entries; one request may have 1024."),
    ],
)
def test_too_many_entries_are_refused_with_the_limit(prompt: Any, said: str) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        prompts_of(prompt, "prompt", 1024, 2048)


class Counting:
    """A tokenizer that counts the characters that it was given."""

    def __init__(self, chars_per_token: int) -> None:
        self.n_chars = 0
        self._size = chars_per_token

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        self.n_chars += len(text)
        return [0] * (-(-len(text) // self._size))


def test_a_text_that_is_too_long_is_refused_before_all_of_it_is_read() -> None:
    tokenizer: Any = Counting(2)
    text = "x" * 100 * SEGMENT_CHARS
    with pytest.raises(ContextLengthExceeded, match=r"first \d+ of its 6553600 characters, but at most 40000"):
        check_tokens(tokenizer, text, 40_000)
    assert tokenizer.n_chars <= 3 * SEGMENT_CHARS


@pytest.mark.parametrize("chars", [1000, 5 * SEGMENT_CHARS, 100 * SEGMENT_CHARS])
def test_a_text_that_may_fit_is_not_refused(chars: int) -> None:
    tokenizer: Any = Counting(64)
    check_tokens(tokenizer, "x" * chars, -(-chars // 64))


def bodies() -> WorkThreads:
    return WorkThreads("quire-bodies", LargeWorkLock())


def test_one_large_work_at_a_time_and_smaller_ones_beside_it() -> None:
    running, most, lock = [0], [0], threading.Lock()
    gate, begun = threading.Event(), threading.Event()

    def large() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        begun.set()
        gate.wait(20)
        with lock:
            running[0] -= 1

    async def run() -> None:
        lock = LargeWorkLock()
        threads, texts = WorkThreads("quire-bodies", lock), WorkThreads("quire-text", lock)
        tasks = [asyncio.create_task(one.run(large, LARGE_BYTES + 1, 0)) for one in (threads, texts) * 3]
        await asyncio.to_thread(begun.wait, 20)
        for one in (threads, texts):
            found = await one.run(lambda: threading.current_thread().name, LARGE_BYTES, 0)
            assert found.startswith("quire-bodies_" if one is threads else "quire-text_")
        gate.set()
        await asyncio.gather(*tasks)
        threads.close()
        texts.close()

    asyncio.run(run())
    assert most[0] == 1 and running[0] == 0


def test_large_works_that_wait_are_bounded() -> None:
    async def run() -> None:
        threads, gate = bodies(), threading.Event()
        tasks = [
            asyncio.create_task(threads.run(lambda: gate.wait(20), LARGE_BYTES + 1, 0)) for _ in range(MAX_PENDING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await threads.run(lambda: None, LARGE_BYTES + 1, 0)
        gate.set()
        assert all(await asyncio.gather(*tasks))
        threads.close()

    asyncio.run(run())


def test_texts_that_wait_do_not_keep_bodies_out() -> None:
    """Each kind of work has threads and a queue of its own."""

    async def run() -> None:
        lock, gate = LargeWorkLock(), threading.Event()
        threads, texts = WorkThreads("quire-bodies", lock), WorkThreads("quire-text", lock)
        tasks = [asyncio.create_task(texts.run(lambda: gate.wait(20), 2, 1)) for _ in range(MAX_PENDING)]
        await asyncio.sleep(0)
        assert await threads.run(lambda: 7, 2, 1) == 7
        gate.set()
        assert all(await asyncio.gather(*tasks))
        threads.close()
        texts.close()


def test_short_work_stays_in_its_thread() -> None:
    async def run() -> None:
        threads = bodies()
        assert await threads.run(threading.current_thread, 9, 9) is threading.current_thread()
        assert await threads.run(threading.current_thread, 10, 9) is not threading.current_thread()
        threads.close()

    asyncio.run(run())


def test_bodies_find_room_or_are_told_so() -> None:
    room = BodyMemory(1000)
    with room.share() as first, room.share() as second, room.share() as small:
        first(SMALL_BYTES + 300)
        first(SMALL_BYTES + 600)
        assert room.n_bytes == 600
        with pytest.raises(QueueFull, match=r"bodies of 600 bytes .* 1000 may be"):
            second(SMALL_BYTES + 401)
        second(SMALL_BYTES + 400)
        assert room.n_bytes == 1000
        small(SMALL_BYTES)
    assert room.n_bytes == 0
