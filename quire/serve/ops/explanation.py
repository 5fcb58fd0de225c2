"""GET /v1/requests/{id}/explain: where the time of a request went, in figures and in words, and where it should have.

Owns the wording. Does not own the memory of it (`control/history.py`), which is bounded.
Invariant: only the holder of the key that sent a request is told of it; neighbours are numbers.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.core.errors import shown
from quire.core.events import Explanation, StepGroup
from quire.serve.http.exchange import Exchange
from quire.serve.http.json_pieces import Items, encoded
from quire.serve.http.refusal import Refusal, unavailable
from quire.serve.openai.schema import JsonObject
from quire.serve.state import ServerState

FEW_PARTS = 8
"""Prompts whose parts are laid out at once, in about half a millisecond each."""

_ID = re.compile(r"(?:[a-z]{1,12}[_-])?([0-9a-f]{24})")
"""As answers and the x-request-id header have it: `chatcmpl-`, `cmpl-`, `req_`, ..."""


async def serve_explanation(state: ServerState, exchange: Exchange) -> None:
    """What is remembered of a request; one part for each of its prompts. 404 for one that is unknown or forgotten."""
    given = exchange.scope["path_params"]["request_id"]
    match = _ID.fullmatch(given)
    try:
        found = await state.llm.explain(match[1]) if match else []
    except TimeoutError:
        raise unavailable("engine_stalled", "The engine does not answer now.") from None
    mine = [one for one in found if one.tenant == exchange.tenant.name]
    if not mine:
        raise Refusal(404, f"Nothing is known of a request {shown(given)}.", param="request_id", code="not_found")
    parts = Items(lambda: (_part(state, one) for one in mine))
    answer = {"id": given, "object": "request.explanation", "parts": parts}
    if len(mine) <= FEW_PARTS:
        await exchange.respond(200, encoded(answer))
    else:
        await state.answers.respond_json(exchange, answer)


def _part(state: ServerState, one: Explanation) -> JsonObject:
    figures: dict[str, Any] = msgspec.to_builtins(one)
    del figures["label"], figures["tenant"]
    names = ("step", "time_s", "start", "length", "n_others")
    figures["chunks"] = [dict(zip(names, row, strict=True)) for row in figures["chunks"]]
    of_step = StepGroup.__struct_fields__
    for name in ("steps", "waits"):
        figures[name] = [dict(zip(of_step, row, strict=True)) for row in figures[name]]
    for name in ("miss_wanted", "miss_cached"):
        token = figures[name]
        tokenizer = state.llm.tokenizer
        figures[f"{name}_text"] = None if token is None or tokenizer is None else tokenizer.token_text(token)
    figures["phases"] = _phases(one)
    stats = state.llm.stats()
    figures["expectation"] = state.llm.expectations.of(one, stats.expert_map)
    are_drafted = bool(stats.accepted_at)
    figures["reasons"] = _reasons(one, figures, are_drafted=are_drafted) + figures["expectation"].pop("words")
    return figures


def _phases(one: Explanation) -> list[JsonObject]:
    """The waterfall: name, from and to in seconds since arrival; `to` is null for a phase that lasts."""
    marks = [("queue", 0.0), ("prompt", one.admitted_s), ("output", one.first_token_s)]
    begun = [(name, begin) for name, begin in marks if begin is not None]
    ends = [begin for _, begin in begun[1:]] + [one.ended_s]
    return [{"name": name, "from_s": begin, "to_s": end} for (name, begin), end in zip(begun, ends, strict=True)]


def _reasons(one: Explanation, figures: dict[str, Any], *, are_drafted: bool) -> list[str]:
    """The same in words, what took longest first. are_drafted: the engine has drafts."""
    found: list[tuple[float, str]] = []
    if one.admitted_s is None:
        waited = "It still waits" if not one.end else "It never got a turn"
        found.append((one.ended_s or 1e9, f"{waited}: {one.n_waiting_before} sequences waited when it came."))
    else:
        behind = f" behind {_count(one.n_waiting_before, 'sequence')}" if one.n_waiting_before else ""
        found.append((one.admitted_s, f"It waited {one.admitted_s:.3f} s{behind}."))
    if one.first_token_s is not None and one.admitted_s is not None:
        n_new = one.prompt_len - one.n_cached
        text = f"{n_new} of {one.prompt_len} prompt tokens were computed, in {_count(len(one.chunks), 'chunk')}"
        n_others = max((chunk.n_others for chunk in one.chunks), default=0)
        if n_others:
            text += f" beside up to {_count(n_others, 'other sequence')}"
        found.append((one.first_token_s - one.admitted_s, f"{text}, in {one.first_token_s - one.admitted_s:.3f} s."))
    if one.ended_s is not None and one.first_token_s is not None:
        seconds, n_steps = one.ended_s - one.first_token_s, sum(group.n_steps for group in one.steps)
        n_beside = sum(group.n_prompt_tokens for group in one.steps) - (one.prompt_len - one.n_cached)
        text = f"{_count(one.n_outputs, 'token')} of output took {seconds:.3f} s"
        if n_beside > 0:
            text += f"; of {_count(n_steps, 'step')} in all, some computed {_count(n_beside, 'prompt token')} of others"
        found.append((seconds, f"{text}."))
    if one.n_drafts or (are_drafted and one.n_outputs):
        found.append((0.0, _drafts(one)))
    if one.n_preemptions:
        found.append((0.0, f"It lost its KV pages {_count(one.n_preemptions, 'time')} and computed again."))
    if one.miss_position is not None and one.miss_position < one.prompt_len and one.miss_cached is not None:
        wanted, cached = (shown(figures[f"miss_{name}_text"]) for name in ("wanted", "cached"))
        text = f"The best cached prefix differs at token {one.miss_position}: {wanted} here, {cached} there."
        found.append((0.0, text))
    if one.miss_lost:
        what = _count(one.miss_lost, "token")
        found.append((0.0, f"{what} more of the prompt were cached, but what their windows show had been evicted."))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _drafts(one: Explanation) -> str:
    """Of all its sequences. Each step that brings output brings a token, and the drafts that were kept on top."""
    if not one.n_drafts:
        return "No step of it verified drafts: none were found, or none were expected to pay."
    n_steps, n_kept = one.n_outputs - one.drafts_kept, one.drafts_kept
    instead = f" in place of {one.n_outputs}" if n_kept else ""
    were = "was" if one.draft_tokens == 1 else "were"
    return (
        f"Its output took {_count(n_steps, 'step')}{instead}: {_count(one.draft_tokens, 'draft')} {were} verified in"
        f" {one.n_drafts} of them, and {n_kept or 'none'} kept."
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
