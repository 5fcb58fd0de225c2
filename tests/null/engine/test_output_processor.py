"""What waits for a reader: bounded work at each reading, nothing lost, nothing kept twice."""

from __future__ import annotations

import asyncio
import random

import pytest

from quire.core.clock import MonotonicClock
from quire.core.events import FinishReason, SeqDelta
from quire.core.logprobs import LogprobRows, PackedLogprobs, TokenLogprobs
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.request import Request
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.output_processor import PIECE_CELLS, READ_CELLS, OpenRequest, PartBuffer
from quire.engine.stream import RequestStream

K = 3


def row(token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token), 1, [token + i for i in range(K)], [-float(token) - i for i in range(K)])


def delta(index: int, tokens: list[int], reason: FinishReason | None = None) -> SeqDelta:
    return SeqDelta("r", index, tokens, reason, logprobs=PackedLogprobs.of([row(token) for token in tokens]))


def opened(kind: OutputKind, n: int = 2) -> OpenRequest:
    params = SamplingParams(n=n, logprobs=K, output_kind=kind, max_tokens=100_000)
    request = Request(request_id="r", prompt_token_ids=[1], params=params, max_tokens=100_000, seed=0, end_token_ids=[])
    return OpenRequest(request, None, None, MonotonicClock())


async def no_abort(stream: RequestStream) -> None:
    """Nothing is there to be told."""


def part(index: int, n: int, begin: int = 0) -> CompletionOutput:
    tokens = list(range(begin, begin + n))
    rows = LogprobRows(lambda token: None)
    rows.add(PackedLogprobs.of([row(token) for token in tokens]), tokens)
    return CompletionOutput(index, "".join(f"{token}," for token in tokens), tokens, None, rows)


def test_a_reading_takes_a_bounded_share_and_nothing_is_lost() -> None:
    draw, buffer = random.Random(3), PartBuffer()
    put: dict[int, int] = dict.fromkeys(range(40), 0)
    for _ in range(3000):
        index, n = draw.randrange(40), draw.choice([1, 1, 1, 5, 60])
        buffer.put(part(index, n, put[index]))
        put[index] += n
    taken: dict[int, list[CompletionOutput]] = {index: [] for index in put}
    n_readings = 0
    while buffer:
        n_readings += 1
        parts = buffer.take()
        n_cells = [len(one.token_ids) * (2 + K) for one in parts]
        assert max(n_cells) < PIECE_CELLS + 60 * (2 + K) and sum(n_cells[:-1]) < READ_CELLS
        assert len({one.index for one in parts}) == len(parts), "a completion has one part in an output"
        for one in parts:
            taken[one.index].append(one)
    assert n_readings > 5 and buffer.take() == []
    for index, parts in taken.items():
        tokens = [token for one in parts for token in one.token_ids]
        assert tokens == list(range(put[index]))
        assert "".join(one.text for one in parts) == "".join(f"{token}," for token in tokens)
        assert [next(iter(place)) for one in parts for place in one.logprobs or []] == tokens


def test_who_was_left_comes_first() -> None:
    buffer = PartBuffer()
    for index in range(3):
        for begin in range(0, 3 * PIECE_CELLS, PIECE_CELLS):
            buffer.put(part(index, PIECE_CELLS, begin))
    order = []
    while buffer:
        order += [one.index for one in buffer.take()]
    assert order == [0, 1, 2] * 3


def read(kind: OutputKind, deltas: list[SeqDelta]) -> tuple[list[RequestOutput], RequestStream]:
    """Everything that a reader gets who begins when all has arrived."""

    async def run() -> tuple[list[RequestOutput], RequestStream]:
        stream = RequestStream(opened(kind), no_abort)
        for one in deltas:
            stream.take(one)
        return [output async for output in stream], stream

    return asyncio.run(run())


N = 4 * READ_CELLS // (2 + K)
DELTAS = [
    *(delta(index, [token]) for token in range(1, N) for index in range(2)),
    delta(0, [N], FinishReason.LENGTH), delta(1, [N], FinishReason.STOP),
]  # fmt: skip


def test_a_slow_reader_of_parts_gets_them_all_and_one_end() -> None:
    outputs, stream = read(OutputKind.DELTA, DELTAS)
    assert len(outputs) > 4 and [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index, reason in enumerate(("length", "stop")):
        parts = [one for output in outputs for one in output.outputs if one.index == index]
        assert [token for one in parts for token in one.token_ids] == list(range(1, N + 1))
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + [reason]
        assert parts[-1].cumulative_logprob == pytest.approx(-N * (N + 1) / 2)
    kept = stream.opened.completions
    assert not any(one.token_ids or one.logprobs for one in kept), "what is handed out in parts is kept nowhere else"


@pytest.mark.parametrize("kind", [OutputKind.FINAL_ONLY, OutputKind.CUMULATIVE])
def test_who_reads_the_end_gets_the_whole(kind: OutputKind) -> None:
    outputs, stream = read(kind, DELTAS)
    assert len(outputs) == 1 and outputs[0].finished
    for one in outputs[0].outputs:
        assert one.token_ids == list(range(1, N + 1)) and len(one.logprobs or []) == N
    assert not stream._buffer, "no second copy waits as parts"


def test_a_reader_gives_turns_to_others_while_much_waits() -> None:
    """128 streams that were read slowly are not laid out in one go."""

    async def run() -> int:
        stream, n_turns = RequestStream(opened(OutputKind.DELTA), no_abort), 0
        for one in DELTAS:
            stream.take(one)

        async def other() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        n_outputs = len([output async for output in stream])
        task.cancel()
        assert n_turns >= n_outputs - 1 > 3
        return n_turns

    asyncio.run(run())


def test_an_end_from_outside_reaches_the_reader_of_either_kind() -> None:
    async def run(kind: OutputKind) -> list[RequestOutput]:
        stream = RequestStream(opened(kind), no_abort)
        stream.take(delta(0, [5]))
        stream.end(FinishReason.ABORT)
        return [output async for output in stream]

    for kind in OutputKind:
        outputs = asyncio.run(run(kind))
        ends = [one.finish_reason for output in outputs for one in output.outputs if one.finish_reason]
        assert ends == ["abort", "abort"] and outputs[-1].finished
        assert [token for output in outputs for one in output.outputs for token in one.token_ids] == [5]
