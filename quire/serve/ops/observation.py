"""What can be looked at: /health, /metrics, /version, /v1/models, /load, and /v1/engine for the web page."""

from __future__ import annotations

import base64
import time
import urllib.parse

import msgspec

from quire import __version__
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import unknown_model
from quire.serve.openai.schema import JsonObject
from quire.serve.page.assets import STARTER_PROMPTS
from quire.serve.state import ServerState

PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


async def serve_health(state: ServerState, exchange: Exchange) -> None:
    """200 while the scheduler makes progress or is idle; 503 while loading, stalled, draining or dead."""
    state.check_healthy()
    await exchange.respond_json({"status": "ok"})


async def serve_metrics(state: ServerState, exchange: Exchange) -> None:
    """Prometheus text."""
    state.metrics.engine_restarts, state.metrics.open_streams = state.llm.n_engines_lost, len(state.live)
    await exchange.respond(200, await state.metrics.text(state.llm.stats()), PROMETHEUS)


async def serve_version(_state: ServerState, exchange: Exchange) -> None:
    """Version of Quire."""
    await exchange.respond_json({"version": __version__})


async def serve_models(state: ServerState, exchange: Exchange) -> None:
    """All names of the model, and its adapters."""
    await exchange.respond_json({"object": "list", "data": [_model(state, name) for name in state.limits.model_names]})


async def serve_model(state: ServerState, exchange: Exchange) -> None:
    """One model by name."""
    name = urllib.parse.unquote(exchange.scope["path_params"]["model"])
    if name not in state.limits.model_names:
        raise unknown_model(name, state.limits.model_names)
    await exchange.respond_json(_model(state, name))


async def serve_engine(state: ServerState, exchange: Exchange) -> None:
    """State of the engine for the web page: gauges, counters and the map of KV pages (base64, one byte a page)."""
    llm = state.llm
    stats = msgspec.to_builtins(llm.stats())
    stats["page_map"] = base64.b64encode(llm.stats().page_map).decode()
    await exchange.respond_json(
        {
            "model": llm.model_name,
            "version": __version__,
            "healthy": llm.healthy() and not state.draining,
            "recovering": llm.is_recovering,
            "time_s": time.monotonic(),
            "engine": msgspec.to_builtins(llm.ready),
            "default_sampling": llm.default_sampling,
            "capabilities": state.style.capabilities,
            "starter_prompts": state.config.starter_prompts or STARTER_PROMPTS,
            "stats": stats,
        }
    )


async def serve_load(state: ServerState, exchange: Exchange) -> None:
    """Figures by which a balancer chooses a server: small, and cheap to ask for often."""
    llm, stats = state.llm, state.llm.stats()
    await exchange.respond_json(
        {
            "healthy": llm.healthy() and not state.draining,
            "num_requests_running": stats.n_running,
            "num_requests_waiting": stats.n_waiting,
            "max_num_seqs": llm.ready.max_num_seqs,
            "kv_pages_total": stats.n_pages,
            "kv_pages_free": stats.n_pages_free,
            "kv_cache_usage_perc": 1.0 - stats.n_pages_free / stats.n_pages if stats.n_pages else 0.0,
            "tokens_per_second": llm.speed.tokens_per_s(time.monotonic()),
        }
    )


async def serve_server_load(state: ServerState, exchange: Exchange) -> None:
    """Requests that this API process is working on, in vLLM's shape."""
    await exchange.respond_json({"server_load": len(state.live)})


def _model(state: ServerState, name: str) -> JsonObject:
    adapter = next((one for one in state.llm.stats().adapters if one.name == name), None)
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "quire",
        "root": state.llm.model_name if adapter is None else adapter.path,
        "parent": None if adapter is None else state.llm.model_name,
        "max_model_len": state.llm.max_model_len,
    }
