"""The shape of a response of POST /v1/responses, and the events that build it up piece by piece.

One state serves both: what a stream announces is what the whole answer holds. Does not own running (`generation.py`).
Invariants: events are numbered from 0 without a gap; every item and part that was added is done before the last event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from quire.core.logprobs import LogprobRows
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling import SamplingParams
from quire.serve.http.json_pieces import LaidOut, encoded, json_pieces
from quire.serve.http.refusal import Refusal
from quire.serve.openai.blocks import BlockKind, Change, ContentBlock, ContentBlocks
from quire.serve.openai.logprobs import TokenNames, chat_entries
from quire.serve.openai.responses_schema import ResponsesRequest
from quire.serve.openai.schema import JsonObject
from quire.text.message import MessageReader

SMALL_ROWS = 64
"""Rows of logprobs that a few events may repeat without being laid out beside the event loop."""

Event = JsonObject
Frames = bytes | Iterator[bytes]

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


class ResponseAnswer:
    """One response, whole or as events. shows_logprobs: parts carry their tokens' logprobs."""

    def __init__(
        self,
        body: ResponsesRequest,
        params: SamplingParams,
        request_id: str,
        names: TokenNames,
        reader: Callable[[], MessageReader] | None,
        *,
        shows_logprobs: bool,
    ) -> None:
        self._id = request_id
        self._names = names
        self._n_top = body.top_logprobs or 0
        self._shows_logprobs = shows_logprobs
        self._head = _head(body, params, request_id)
        self._blocks = ContentBlocks(reader)
        self._rows: dict[int, LogprobRows] = {}
        """Logprobs of each text block."""
        self._new_rows: LogprobRows | None = None
        """Of these, not yet told."""
        self._n_events = 0
        self._reason: str | None = None

    def whole(self, outputs: list[RequestOutput], usage: JsonObject) -> JsonObject:
        """The response of a request that is not streamed."""
        self._take(outputs[0].outputs[0])
        return self._response(usage)

    def frames(self, _prompt_index: int, output: RequestOutput) -> Frames:
        """Events for what is new."""
        events: list[Event] = []
        if self._n_events == 0:
            started = {**self._head, "status": "in_progress", "output": [], "usage": None}
            events.append(self._event("response.created", response=started))
            events.append(self._event("response.in_progress", response=started))
        for part in output.outputs:
            for change in self._take(part):
                events += self._changed(change)
            if part.finish_reason is not None and self._blocks.all:
                events += self._done(self._blocks.all[-1])
        return self._written(events)

    def closing(self, usage: JsonObject) -> Frames:
        """The last event, with the whole response."""
        response = self._response(usage)
        return self._written([self._event(f"response.{response['status']}", response=response)])

    def failure(self, refusal: Refusal) -> bytes:
        """The last events when it went wrong on the way, which repeat no logprobs. `error` is also where openai-python
        looks for it."""
        self._rows.clear()
        about = {"code": refusal.code, "message": refusal.message, "param": refusal.param}
        response = {**self._head, "status": "failed", "output": self._items("incomplete"), "usage": None}
        response["error"] = {"code": "server_error", "message": refusal.message}
        events = [self._event("response.failed", response=response)]
        events.append(self._event("error", **about, error={**about, "type": refusal.kind}))
        return b"".join(piece for event in events for piece in _pieces(event))

    def _take(self, part: CompletionOutput) -> list[Change]:
        if self._shows_logprobs and part.logprobs is not None:
            if self._new_rows is None:
                self._new_rows = part.logprobs
            else:
                self._new_rows.join(part.logprobs)
        changes = self._blocks.take(part)
        self._reason = part.finish_reason or self._reason
        for change in changes:
            if change.block.kind is BlockKind.TEXT and self._new_rows is not None:
                self._rows.setdefault(change.block.index, LogprobRows(self._names.text)).join(self._new_rows)
        return changes

    def _changed(self, change: Change) -> list[Event]:
        block = change.block
        events: list[Event] = []
        if change.begins:
            if block.index:
                events += self._done(self._blocks.all[block.index - 1])
            events += self._added(block)
        if not change.delta:
            return events
        where = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind is BlockKind.TEXT:
            rows, self._new_rows = self._new_rows, None
            new = {"delta": change.delta, "logprobs": self._logprobs(rows)}
            events.append(self._event("response.output_text.delta", **where, content_index=0, **new))
        elif block.kind is BlockKind.REASONING:
            events.append(self._event("response.reasoning_text.delta", **where, content_index=0, delta=change.delta))
        else:
            events.append(self._event("response.function_call_arguments.delta", **where, delta=change.delta))
        return events

    def _added(self, block: ContentBlock) -> list[Event]:
        empty = ContentBlock(block.kind, block.index, "", block.call_id, block.name)
        item = self._item(empty, "in_progress")
        events = [self._event("response.output_item.added", output_index=block.index, item={**item, **_no_parts(item)})]
        if block.kind is not BlockKind.CALL:
            where = {"item_id": item["id"], "output_index": block.index, "content_index": 0}
            events.append(self._event("response.content_part.added", **where, part=self._part(empty)))
        return events

    def _done(self, block: ContentBlock) -> list[Event]:
        item = self._item(block, "completed")
        where = {"item_id": item["id"], "output_index": block.index}
        events: list[Event] = []
        if block.kind is BlockKind.CALL:
            about = {**where, "name": block.name, "arguments": block.text}
            events.append(self._event("response.function_call_arguments.done", **about))
        else:
            where["content_index"] = 0
            part = self._part(block)
            if block.kind is BlockKind.TEXT:
                about = {**where, "text": block.text, "logprobs": part["logprobs"]}
                events.append(self._event("response.output_text.done", **about))
            else:
                events.append(self._event("response.reasoning_text.done", **where, text=block.text))
            events.append(self._event("response.content_part.done", **where, part=part))
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return events

    def _response(self, usage: JsonObject) -> JsonObject:
        is_cut = self._reason == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(status),
            "usage": _usage(usage),
        }

    def _items(self, last_status: str) -> list[JsonObject]:
        last = len(self._blocks.all) - 1
        return [self._item(block, last_status if block.index == last else "completed") for block in self._blocks.all]

    def _item(self, block: ContentBlock, status: str) -> JsonObject:
        item: JsonObject = {"id": self._item_id(block), "type": "message", "status": status}
        if block.kind is BlockKind.CALL:
            return {
                **item,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
        if block.kind is BlockKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": [self._part(block)]}
        return {**item, "role": "assistant", "content": [self._part(block)]}

    def _part(self, block: ContentBlock) -> JsonObject:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": block.text}
        rows = self._rows.get(block.index) if block.text else None
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs(rows)}

    def _logprobs(self, rows: LogprobRows | None) -> LaidOut:
        return LaidOut(lambda: chat_entries(rows, self._n_top, self._names))

    def _item_id(self, block: ContentBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _event(self, kind: str, **fields: object) -> Event:
        number, self._n_events = self._n_events, self._n_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _written(self, events: list[Event]) -> Frames:
        """Few events are written at once. Those that repeat many rows are laid out piece by piece."""
        n_rows = sum(len(rows) for rows in self._rows.values())
        if n_rows <= SMALL_ROWS:
            return b"".join([b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event)) for event in events])
        return (piece for event in events for piece in _pieces(event))


def _pieces(event: Event) -> Iterator[bytes]:
    yield b"event: %b\ndata: " % event["type"].encode()
    yield from json_pieces(event)
    yield b"\n\n"


def _no_parts(item: JsonObject) -> JsonObject:
    """An item is announced before its parts are."""
    return {"content": []} if "content" in item else {}


def _head(body: ResponsesRequest, params: SamplingParams, request_id: str) -> JsonObject:
    """What a response repeats of its request; with the parameters that hold where the request said nothing."""
    tools = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
         "strict": bool(tool.strict)}
        for tool in body.tools or []
        if tool.type == "function"
    ]  # fmt: skip
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
    }


def _usage(chat: JsonObject) -> JsonObject:
    """Chat's counts under the names that responses have."""
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": chat["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": chat["completion_tokens_details"],
        "total_tokens": chat["total_tokens"],
    }
