"""Large answers: cut into pieces that join to the same JSON, made beside the loop, written as they are read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.serve.http.answers import SLICE_BYTES, AnswerMaker
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import SLICE_CHARS, SLICE_ITEMS, Items, LaidOut, encoded, json_pieces
from quire.serve.http.refusal import internal_error

VALUES: list[Any] = [
    None, True, 1, -0.5, "", "text", [], {}, [[]], {"a": {}}, [None, 1], ["a", 1],
    "é\n\"\\" * SLICE_CHARS, list(range(3 * SLICE_ITEMS + 1)), [0.5] * SLICE_ITEMS,
    {"choices": [{"index": i, "text": "x" * i, "list": [1, 2]} for i in range(50)], "usage": None},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[str(value)[:20] for value in VALUES])
def test_pieces_join_to_the_value(value: Any) -> None:
    pieces = list(json_pieces(value))
    assert b"".join(pieces) == msgspec.json.encode(value)
    assert max(map(len, pieces)) <= 12 * SLICE_CHARS


def test_what_is_laid_out_later() -> None:
    def value() -> Any:
        inner = LaidOut(lambda: iter([b"[1,", b"2]"]))
        return {"items": Items(lambda: ({"n": i, "laid": inner} for i in range(3))), "none": Items(lambda: iter(()))}

    expected = {"items": [{"n": i, "laid": [1, 2]} for i in range(3)], "none": []}
    assert json.loads(b"".join(json_pieces(value()))) == expected == json.loads(encoded(value()))
    with pytest.raises(NotImplementedError, match="object is no JSON value"):
        encoded({"x": object()})


class Client:
    """The other end of an exchange, and its connection. `reads` False: it takes nothing after the first slice."""

    is_lost, response_started, refused_status = False, True, 0

    def __init__(self, *, reads: bool = True) -> None:
        self.messages: list[dict[str, Any]] = []
        self.is_cut = False
        self._reads = reads
        scope = {"type": "http", "method": "POST", "raw_path": b"/v1/x", "headers": []}
        self.exchange = Exchange({**scope, "extensions": {"quire.link": self}}, self.receive, self.send)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    def abort(self) -> None:
        self.is_cut = True

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.messages) > 1 and not self._reads:
            await asyncio.Event().wait()
        self.messages.append(message)


def respond(client: Client, value: Any) -> None:
    async def run() -> None:
        maker = AnswerMaker()
        try:
            await maker.respond_json(client.exchange, value)
        finally:
            maker.close()

    asyncio.run(run())


LARGE = [{"text": "x" * 1000, "index": index} for index in range(3 * SLICE_BYTES // 1000)]


def test_a_large_answer_is_written_in_slices() -> None:
    client = Client()
    respond(client, LARGE)
    assert json.loads(client.body) == LARGE and b"content-length" not in client.headers
    assert len(client.messages) >= 4 and max(len(message.get("body", b"")) for message in client.messages) < 300_000
    assert client.messages[-1]["more_body"] is False and client.exchange.status == 200


def test_one_slice_has_its_length() -> None:
    client = Client()
    respond(client, {"a": 1})
    assert client.body == b'{"a":1}' and client.headers[b"content-length"] == b"7"


def test_no_more_is_made_than_is_read() -> None:
    client, made = Client(reads=False), []

    def items() -> Iterator[str]:
        for index in range(10_000):
            made.append(index)
            yield "x" * 10_000

    async def run() -> None:
        maker = AnswerMaker()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await maker.respond_json(client.exchange, Items(items))
        maker.close()

    asyncio.run(run())
    assert 0 < len(made) < 1000 and len(client.messages) == 2


def test_what_fails_on_the_way_is_cut_off_not_ended() -> None:
    """Half an answer must not look like a whole one."""

    def items() -> Iterator[str]:
        yield from ["x" * SLICE_BYTES] * 3
        raise RuntimeError("as asked")

    async def run() -> None:
        maker = AnswerMaker()
        with pytest.raises(RuntimeError):
            await maker.respond_json(client.exchange, Items(items))
        maker.close()
        await client.exchange.refuse(internal_error())

    client = Client()
    asyncio.run(run())
    assert client.is_cut and client.messages[-1]["more_body"] is True


def test_slices_of_several_answers_take_turns() -> None:
    order: list[str] = []

    def items(name: str) -> Iterator[str]:
        for _ in range(6):
            order.append(name)
            yield "x" * SLICE_BYTES

    async def run() -> None:
        maker = AnswerMaker()
        await asyncio.gather(*(maker.respond_json(Client().exchange, Items(lambda n=n: items(n))) for n in "ab"))
        maker.close()

    asyncio.run(run())
    assert order.index("b") < 4 and len(order) == 12
