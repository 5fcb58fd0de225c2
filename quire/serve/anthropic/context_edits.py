"""`context_management`: edits of a conversation, taken where they find nothing to do.

Owns when an edit of Anthropic's would change something. Nothing is ever cleared or compacted here.
Invariant: an edit that would change the prompt is refused by its place, as is one that is not known.
"""

from __future__ import annotations

from typing import Any

from quire.core.errors import shown
from quire.serve.anthropic.schema import CountTokensRequest, ThinkingBlock, ToolResultBlock, ToolUseBlock
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import bad_request, unsupported
from quire.serve.openai.schema import JsonObject

FIELD = "context_management"
MAX_EDITS = 16
KEPT_TOOL_USES, KEPT_THINKING_TURNS = 3, 1
CLEARING_TOKENS, COMPACTING_TOKENS = 100_000, 150_000
"""What Anthropic's API takes where an edit does not say."""


def check_edits(body: CountTokensRequest, n_tokens: int, ignored: IgnoredParams) -> None:
    """Note edits that find nothing to do in this conversation of `n_tokens`; a 400 Refusal for any other."""
    if body.context_management is None:
        return
    edits = body.context_management.get("edits") or []
    unknown = body.context_management.keys() - {"edits"}
    if unknown or not isinstance(edits, list) or len(edits) > MAX_EDITS:
        raise bad_request(f"{FIELD} must have a list edits of at most {MAX_EDITS}, and nothing else.", FIELD)
    for index, edit in enumerate(edits):
        where = f"{FIELD}.edits[{index}]"
        if not isinstance(edit, dict) or not isinstance(edit.get("type"), str):
            raise bad_request(f"{where} must be an object with a type.", where)
        if not _finds_nothing(edit, body, n_tokens):
            raise unsupported(
                where,
                f"{shown(edit['type'])} would change this conversation of {n_tokens} tokens, or is not known; send the "
                "part of the conversation that matters.",
            )
    ignored.note(FIELD)


def _finds_nothing(edit: JsonObject, body: CountTokensRequest, n_tokens: int) -> bool:
    kind = edit["type"].rpartition("_")[0]
    keep = edit.get("keep")
    if kind == "clear_thinking":
        kept = _number(keep, "thinking_turns", KEPT_THINKING_TURNS)
        return keep in ("all", {"type": "all"}) or (kept is not None and _n_thinking_turns(body) <= kept)
    if kind == "clear_tool_uses":
        kept = _number(keep, "tool_uses", KEPT_TOOL_USES)
        n_uses = _n_tool_uses(body, edit.get("exclude_tools"))
        if kept is not None and n_uses <= kept:
            return True
        most = _number(edit.get("trigger"), "tool_uses", None)
        if most is not None:
            return _n_tool_uses(body, None) <= most
        return _is_below(edit.get("trigger"), CLEARING_TOKENS, n_tokens)
    return kind == "compact" and _is_below(edit.get("trigger"), COMPACTING_TOKENS, n_tokens)


def _is_below(trigger: Any, default: int, n_tokens: int) -> bool:
    most = _number(trigger, "input_tokens", default)
    return most is not None and n_tokens <= most


def _number(given: Any, kind: str, default: int | None) -> int | None:
    """`{"type": kind, "value": N}`; None for what is something else."""
    if given is None:
        return default
    value = given.get("value") if isinstance(given, dict) and given.get("type") == kind else None
    return value if type(value) is int and value >= 0 else None


def _n_thinking_turns(body: CountTokensRequest) -> int:
    turns = [turn.content for turn in body.messages if isinstance(turn.content, list)]
    return sum(any(isinstance(block, ThinkingBlock) for block in turn) for turn in turns)


def _n_tool_uses(body: CountTokensRequest, excluded: Any) -> int:
    """Calls with a result, but for those of the excluded tools."""
    blocks = [block for turn in body.messages if isinstance(turn.content, list) for block in turn.content]
    names = set(filter(lambda one: isinstance(one, str), excluded)) if isinstance(excluded, list) else set()
    kept = {block.id for block in blocks if isinstance(block, ToolUseBlock) and block.name in names}
    return sum(isinstance(block, ToolResultBlock) and block.tool_use_id not in kept for block in blocks)
