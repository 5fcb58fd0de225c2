"""Event-stream frames, rendered ahead: a token costs the JSON of its own text and two joins. Owns their exact bytes.

`data: {head "choices":[{"index":i, ... text ... }] tail}` where the head is fixed for a request, and the tail too
unless it counts.
Invariant: every frame is one complete event, `data: ` + JSON + blank line.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.openai.validation import StreamChoice

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event with `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


class FrameMaker:
    """Frames of one streamed answer. With `include_usage` each chunk says `"usage":null`, as the API has it, or what
    `count` was told last."""

    def __init__(self, head: dict[str, Any], choice: StreamChoice) -> None:
        self._head = head
        self._with_usage = with_usage = choice.include_usage
        self._is_counting = choice.continuous_usage
        self._n_output: dict[int, int] = {}
        self._prefix = b"data: " + encode(head)[:-1] + b',"choices":[{"index":'
        self._suffix = (b',"usage":null' if with_usage else b"") + b"}\n\n"

    def count(self, index: int, n_prompt: int, n_new: int) -> None:
        """New tokens of a choice, for the counts that its next chunks have, as vLLM has them: of its prompt and of the
        choice alone."""
        if self._is_counting:
            self._n_output[index] = n_output = self._n_output.get(index, 0) + n_new
            counts = {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_output,
                "total_tokens": n_prompt + n_output,
            }
            self._end_with(b',"usage":%b}\n\n' % encode(counts))

    def _end_with(self, suffix: bytes) -> None:
        """How all chunks end from now on."""
        self._suffix = suffix

    def closing(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices that carries the counts, if they were asked for, and the mark of the end."""
        counts = event({**self._head, "choices": [], "usage": usage}) if self._with_usage else b""
        return counts + DONE


class ChatFrames(FrameMaker):
    """Chunks of a chat completion."""

    def __init__(self, answer_id: str, created: int, model: str, choice: StreamChoice) -> None:
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        super().__init__(head, choice)
        self._open = b',"delta":{"content":'
        self._end_with(self._suffix)

    def _end_with(self, suffix: bytes) -> None:
        super()._end_with(suffix)
        self._plain_end = b'},"logprobs":null,"finish_reason":null}]' + suffix

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
        """New reasoning of a choice, under vLLM's older name and its newer one."""
        written = encode(text)
        delta = b',"delta":{"reasoning_content":%b,"reasoning":%b' % (written, written)
        return b"%b%d%b%b" % (self._prefix, index, delta, self._plain_end)

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

    def __init__(self, answer_id: str, created: int, model: str, choice: StreamChoice) -> None:
        super().__init__({"id": answer_id, "object": "text_completion", "created": created, "model": model}, choice)
        self._end_with(self._suffix)

    def _end_with(self, suffix: bytes) -> None:
        super()._end_with(suffix)
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + suffix

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
