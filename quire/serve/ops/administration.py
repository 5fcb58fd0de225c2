"""What an operator asks of a running server: /reset_prefix_cache, /sleep, /wake_up, /is_sleeping, by vLLM's names.

Owns who may ask: whoever has the operator's key (--api-key), or anybody where there are no keys; keys of --api-key-file
may not, because all tenants would feel it. Does not own what sleep is (`engine/sleep.py`).
"""

from __future__ import annotations

from quire.core.errors import ConfigError, InvalidParameter
from quire.serve.http.exchange import Exchange
from quire.serve.http.query import query_of
from quire.serve.http.refusal import Refusal, bad_request, refusal_of
from quire.serve.state import ServerState


async def serve_reset_prefix_cache(state: ServerState, exchange: Exchange) -> None:
    """Forget the cached prefixes that no open request holds."""
    state.check_open()
    check_operator(exchange)
    query = query_of(exchange, {"reset_running_requests", "reset_external"})
    for name, values in query.items():
        if any(value.lower() not in ("false", "0") for value in values):
            raise bad_request(f"{name} = {values[-1][:100]!r} is not supported: only false is.", name)
    await exchange.respond_json({"success": await state.llm.reset_prefix_cache()})


async def serve_sleep(state: ServerState, exchange: Exchange) -> None:
    """End every request and give memory back: pages, and at level 2 weights too."""
    state.check_open()
    check_operator(exchange)
    query = query_of(exchange, {"level", "mode"})
    if query.get("mode", ["abort"]) != ["abort"]:
        raise bad_request("mode must be abort: sleep ends the requests that are open.", "mode")
    level = query.get("level", ["1"])
    if level not in (["1"], ["2"]):
        raise bad_request(f"level = {level[-1][:100]!r} is not allowed: it must be 1 or 2.", "level")
    try:
        await state.llm.sleep(int(level[0]))
    except ConfigError as error:
        raise _disabled(error) from None
    await exchange.respond_json({"is_sleeping": True})


async def serve_wake_up(state: ServerState, exchange: Exchange) -> None:
    """Bring back what sleep gave up."""
    state.check_open()
    check_operator(exchange)
    try:
        await state.llm.wake_up(query_of(exchange, {"tags"}).get("tags"))
    except ConfigError as error:
        raise _disabled(error) from None
    except InvalidParameter as error:
        raise refusal_of(error) from None
    await exchange.respond_json({"is_sleeping": False})


async def serve_is_sleeping(state: ServerState, exchange: Exchange) -> None:
    """Whether the engine sleeps."""
    await exchange.respond_json({"is_sleeping": await state.llm.is_sleeping()})


def check_operator(exchange: Exchange) -> None:
    """403 for the key of a tenant."""
    if not exchange.tenant.is_operator:
        message = "Only the operator's key (--api-key) may do this: it concerns every tenant."
        raise Refusal(403, message, code="operator_only")


def _disabled(error: ConfigError) -> Refusal:
    return bad_request(f"{error.message}.", code="sleep_disabled")
