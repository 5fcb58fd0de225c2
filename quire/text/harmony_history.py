"""A conversation as the chat templates of gpt-oss take it. Owns what differs from other models' templates.

Theirs render one call a message, take reasoning as `thinking`, and refuse it beside content where there is a call; they
know instructions in the first message alone. Invariant: nothing that was said is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

JsonObject = dict[str, Any]


def turns_of(chat: list[JsonObject]) -> list[JsonObject]:
    """Plain messages, with content as text → those that the template takes. Roles are checked, and system stands for
    developer."""
    found: list[JsonObject] = []
    at = 0
    while at < len(chat):
        message, at = chat[at], at + 1
        if message["role"] != "assistant":
            found.append(message)
            continue
        begin = at
        while at < len(chat) and chat[at]["role"] == "tool":
            at += 1
        found += _assistant(message, chat[begin:at])
    return _instructed(found)


def with_descriptions(tools: list[JsonObject] | None) -> list[JsonObject] | None:
    """Functions of which each has a description, as the template takes it."""
    for tool in tools or []:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("description") is None:
            function["description"] = ""
    return tools


def _instructed(chat: list[JsonObject]) -> list[JsonObject]:
    """All instructions at the beginning as one message."""
    n_system = next((at for at, one in enumerate(chat) if one["role"] != "system"), len(chat))
    if n_system < 2:
        return chat
    text = "\n\n".join(str(one["content"]) for one in chat[:n_system] if one.get("content"))
    return [{**chat[0], "content": text}, *chat[n_system:]]


def _assistant(message: JsonObject, results: list[JsonObject]) -> Iterator[JsonObject]:
    """One turn and the results of its calls: for each call a message, and its result behind it."""
    message = dict(message)
    thought = message.get("thinking") or message.get("reasoning_content") or message.get("reasoning")
    calls = message.pop("tool_calls", None) or []
    content = message.get("content") or ""
    if message.get("content") is None:
        message.pop("content", None)
    if thought:
        message["thinking"] = thought
    if not calls:
        yield message
        yield from results
        return
    if thought and content:
        message |= {"thinking": f"{thought}\n\n{content}", "content": ""}
    left, ids = list(results), {call.get("id") for call in calls}
    for at, call in enumerate(calls):
        first = message if at == 0 else {"role": message["role"], "content": ""}
        yield {**first, "tool_calls": [call]}
        nameless = (one for one in left if one.get("tool_call_id") not in ids)
        own = next((one for one in left if one.get("tool_call_id") == call.get("id")), next(nameless, None))
        if own is not None:
            left.remove(own)
            yield own
    yield from left
