"""The shape of what /api/chat and /api/generate say, whole or as lines of JSON.

Does not own running (`openai/generation.py`) nor reading the model's text (`openai/blocks.py`).
Invariants: the parts of a stream join to the whole answer; a call comes in one piece, once its arguments are complete;
the last line, and no other, has `done: true` and the counts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import msgspec

from quire.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.serve.openai.blocks import BlockKind, ContentBlock, ContentBlocks, arguments_of
from quire.serve.openai.schema import JsonObject
from quire.text.message import MessageReader

NS = 1_000_000_000
"""Nanoseconds in a second: the unit of all durations here."""


class OllamaReply:
    """One answer. is_chat: /api/chat, which has messages; else /api/generate, which has texts."""

    def __init__(self, model: str, reader: Callable[[], MessageReader] | None, *, is_chat: bool) -> None:
        self._model, self._is_chat = model, is_chat
        self._blocks = ContentBlocks(reader)
        self._n_called = 0
        """Blocks before this one are no call, or a call that was sent."""
        self._last: CompletionOutput | None = None
        self._metrics = RequestMetrics()

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The answer of a request that is not streamed."""
        self._take(outputs[0])
        by_kind = {kind: [block for block in self._blocks.all if block.kind is kind] for kind in BlockKind}
        content, thinking = (
            "".join(block.text for block in by_kind[kind]) for kind in (BlockKind.TEXT, BlockKind.REASONING)
        )
        return self._line(content, thinking, by_kind[BlockKind.CALL], self._end(usage))

    def frames(self, _prompt_index: int, output: RequestOutput) -> bytes:
        """Lines for what is new."""
        lines = self._take(output)
        return b"".join([self._encoded(*line) for line in lines])

    def closing(self, usage: JsonObject) -> bytes:
        """The last line: why it ended, and the counts."""
        return msgspec.json.encode(self._line("", "", [], self._end(usage))) + b"\n"

    def silence(self) -> bytes:
        """A line that says nothing, for a stream that must not be silent for long."""
        return self._encoded("", "", [])

    def loaded(self) -> JsonObject:
        """The answer to a request that only wants the model to be there."""
        return self._line("", "", [], {"done_reason": "load", "done": True})

    def _take(self, output: RequestOutput) -> list[tuple[str, str, list[ContentBlock]]]:
        """(content, thinking, calls) of what is new."""
        self._metrics, found = output.metrics, []
        for part in output.outputs:
            self._last = part
            for change in self._blocks.take(part):
                if change.begins:
                    found += self._called(change.block.index)
                if change.delta and change.block.kind is not BlockKind.CALL:
                    is_text = change.block.kind is BlockKind.TEXT
                    found.append((change.delta, "", []) if is_text else ("", change.delta, []))
            if part.finish_reason is not None:
                found += self._called(len(self._blocks.all))
        return found

    def _called(self, stop: int) -> list[tuple[str, str, list[ContentBlock]]]:
        """The calls before block `stop` that were not sent: they are complete."""
        new = [block for block in self._blocks.all[self._n_called : stop] if block.kind is BlockKind.CALL]
        self._n_called = stop
        return [("", "", [block]) for block in new]

    def _encoded(self, content: str, thinking: str, calls: list[ContentBlock]) -> bytes:
        return msgspec.json.encode(self._line(content, thinking, calls, {"done": False})) + b"\n"

    def _line(self, content: str, thinking: str, calls: list[ContentBlock], end: JsonObject) -> JsonObject:
        head: JsonObject = {"model": self._model, "created_at": now()}
        said: JsonObject = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**head, "response": content, **said, **end}
        if calls:
            said["tool_calls"] = [self._call(block) for block in calls]
        return {**head, "message": {"role": "assistant", "content": content, **said}, **end}

    def _call(self, block: ContentBlock) -> JsonObject:
        """index: counts the calls of the answer."""
        before = sum(one.kind is BlockKind.CALL for one in self._blocks.all[: block.index])
        function = {"index": before, "name": block.name, "arguments": arguments_of(block.text)}
        return {"id": block.call_id, "function": function}

    def _end(self, usage: JsonObject) -> JsonObject:
        metrics = self._metrics
        first_s = metrics.first_token_s or metrics.arrival_s
        ended_s = metrics.finished_s or first_s
        return {
            "done_reason": "length" if self._last is not None and self._last.finish_reason == "length" else "stop",
            "done": True,
            "total_duration": _ns(ended_s - metrics.arrival_s),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _ns(first_s - metrics.arrival_s - metrics.queued_s),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _ns(ended_s - first_s),
        }


def now() -> str:
    """The time of day as RFC 3339 has it, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * NS))
