"""Event-stream frames, rendered ahead: a token costs the JSON of its own text and two joins. Owns their exact bytes.

`data: {head "choices":[{"index":i, ... text ... }] tail}` where head and tail are fixed for a request.
Invariant: every frame is one complete event, `data: ` + JSON + blank line.
"""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


class FrameMaker:
    """Frames of one streamed answer. With `with_usage` each chunk says `"usage":null`, as the API has it."""

    def __init__(self, head: dict[str, Any], with_usage: bool) -> None:
        self._head = head
        self._with_usage = with_usage
        self._prefix = b"data: " + encode(head)[:-1] + b',"choices":[{"index":'
        self._suffix = (b',"usage":null' if with_usage else b"") + b"}\n\n"

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the counts, if they were asked for, and the mark of the end."""
        counts = event({**self._head, "choices": [], "usage": usage}) if self._with_usage else b""
        return counts + DONE


class ChatFrames(FrameMaker):
    """Chunks of a chat completion."""

    def __init__(self, answer_id: str, created: int, model: str, with_usage: bool) -> None:
        super().__init__(
            {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}, with_usage
        )
        self._open = b',"delta":{"content":'
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]' + self._suffix

    def role(self, index: int) -> bytes:
        """The first chunk of a choice."""
        return b"%b%d%b" % (self._prefix, index, b',"delta":{"role":"assistant","content":""' + self._plain_end)

    def text(self, index: int, text: str, logprobs: bytes | None = None) -> bytes:
        """New text of a choice. logprobs: JSON."""
        if logprobs is None:
            return b"%b%d%b%b%b" % (self._prefix, index, self._open, encode(text), self._plain_end)
        end = b'},"logprobs":' + logprobs + b',"finish_reason":null}]' + self._suffix
        return b"%b%d%b%b%b" % (self._prefix, index, self._open, encode(text), end)

    def reasoning(self, index: int, text: str) -> bytes:
        """New reasoning of a choice."""
        return b'%b%d,"delta":{"reasoning_content":%b%b' % (self._prefix, index, encode(text), self._plain_end)

    def call(self, index: int, call: int, call_id: str, name: str) -> bytes:
        """A tool call of a choice begins."""
        begun = {"index": call, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        return b'%b%d,"delta":{"tool_calls":[%b]%b' % (self._prefix, index, encode(begun), self._plain_end)

    def arguments(self, index: int, call: int, text: str) -> bytes:
        """More of a tool call's arguments."""
        more = {"index": call, "function": {"arguments": text}}
        return b'%b%d,"delta":{"tool_calls":[%b]%b' % (self._prefix, index, encode(more), self._plain_end)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of a choice."""
        end = b',"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}]' % (
            encode(reason),
            encode(stop_reason),
        )
        return b"%b%d%b%b" % (self._prefix, index, end, self._suffix)


class TextFrames(FrameMaker):
    """Chunks of a text completion."""

    def __init__(self, answer_id: str, created: int, model: str, with_usage: bool) -> None:
        super().__init__({"id": answer_id, "object": "text_completion", "created": created, "model": model}, with_usage)
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._suffix

    def text(self, index: int, text: str, logprobs: bytes | None = None, token_ids: list[int] | None = None) -> bytes:
        """New text of a choice, and its tokens if they are shown. logprobs: JSON."""
        shown = encode(text) if token_ids is None else encode(text) + b',"token_ids":' + encode(token_ids)
        if logprobs is None:
            return b'%b%d,"text":%b%b' % (self._prefix, index, shown, self._plain_end)
        end = b',"logprobs":' + logprobs + b',"finish_reason":null}]' + self._suffix
        return b'%b%d,"text":%b%b' % (self._prefix, index, shown, end)

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of a choice."""
        end = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}]' % (encode(reason), encode(stop_reason))
        return b'%b%d,"text":""%b%b' % (self._prefix, index, end, self._suffix)
