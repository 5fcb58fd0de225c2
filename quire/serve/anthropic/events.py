"""The shape of a message of POST /v1/messages, and the events that build it up.

One state serves both: what a stream announces is what the whole message holds. Does not own running
(`openai/generation.py`).
Invariant: blocks begin and stop in order of their index, each once.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.outputs import CompletionOutput, RequestOutput
from quire.serve.openai.blocks import BlockKind, Change, ContentBlock, ContentBlocks, arguments_of
from quire.serve.openai.frames import encode
from quire.serve.openai.schema import JsonObject
from quire.text.message import MessageReader


class MessageAnswer:
    """One message, whole or as events."""

    def __init__(self, model: str, request_id: str, reader: Callable[[], MessageReader] | None) -> None:
        self._head: JsonObject = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks = ContentBlocks(reader)
        self._last: CompletionOutput | None = None
        self._is_begun = False

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The message of a request that is not streamed."""
        self._take(outputs[0].outputs[0])
        content = [_content(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._end(), "usage": _usage(usage)}

    def frames(self, _prompt_index: int, output: RequestOutput) -> bytes:
        """Events for what is new."""
        events: list[bytes] = []
        if not self._is_begun:
            self._is_begun = True
            usage = _counts(len(output.prompt_token_ids), output.num_cached_tokens, 0)
            message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            events.append(_event("message_start", message=message))
        for part in output.outputs:
            for change in self._take(part):
                events += self._changed(change)
            if part.finish_reason is not None and self._blocks.all:
                events.append(_event("content_block_stop", index=self._blocks.all[-1].index))
        return b"".join(events)

    def closing(self, usage: JsonObject) -> bytes:
        """Why it ended, the counts, and the end."""
        return _event("message_delta", delta=self._end(), usage=_usage(usage)) + _event("message_stop")

    def _take(self, part: CompletionOutput) -> list[Change]:
        self._last = part
        return self._blocks.take(part)

    def _changed(self, change: Change) -> list[bytes]:
        block, events = change.block, []
        if change.begins:
            if block.index:
                events.append(_event("content_block_stop", index=block.index - 1))
            empty = ContentBlock(block.kind, block.index, "", block.call_id, block.name)
            events.append(_event("content_block_start", index=block.index, content_block=_content(empty)))
        if change.delta:
            events.append(_event("content_block_delta", index=block.index, delta=_delta(block, change.delta)))
        return events

    def _end(self) -> JsonObject:
        last = self._last
        reason, sequence = "end_turn", None
        if last is not None and last.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind is BlockKind.CALL for block in self._blocks.all):
            reason = "tool_use"
        elif last is not None and isinstance(last.stop_reason, str):
            reason, sequence = "stop_sequence", last.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}


def _content(block: ContentBlock) -> JsonObject:
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments_of(block.text)}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _delta(block: ContentBlock, text: str) -> JsonObject:
    if block.kind is BlockKind.CALL:
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _usage(chat: JsonObject) -> JsonObject:
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    return _counts(chat["prompt_tokens"], cached, chat["completion_tokens"])


def _counts(n_prompt: int, n_cached: int, n_output: int) -> JsonObject:
    """Anthropic counts a cached token apart from the others."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_output,
    }


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
