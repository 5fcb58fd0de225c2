"""The ASGI application: the route table, and the gate that every request passes before its route.

Owns the order of the checks (host, origin, key, route, method) and the one place where exceptions become answers. Does
not own any endpoint. Invariants: without the key nothing is answered but the web page's files, probes and preflights;
every check and the router look at the same path, `Exchange.path`; every answer is JSON (or what the route says) with a
request id; nothing raised by an endpoint reaches the HTTP server.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from quire.core.errors import EngineDead, QuireError
from quire.serve.anthropic.messages import serve_count_tokens, serve_messages
from quire.serve.batch.batches import serve_batch, serve_batch_cancel, serve_batch_create, serve_batches
from quire.serve.batch.files import (
    serve_file,
    serve_file_content,
    serve_file_delete,
    serve_file_upload,
    serve_files,
)
from quire.serve.batch.worker import BatchWorker
from quire.serve.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from quire.serve.http.hosts import Hosts
from quire.serve.http.ignored import STRICT_HEADER, asks_strict
from quire.serve.http.misses import no_such_path, wrong_method
from quire.serve.http.refusal import Refusal, internal_error, naming_models, refusal_of
from quire.serve.ollama.generating import serve_ollama_chat, serve_ollama_generate
from quire.serve.ollama.models import serve_ollama_ps, serve_ollama_show, serve_ollama_tags, serve_ollama_version
from quire.serve.ollama.vectors import serve_ollama_embed, serve_ollama_embeddings
from quire.serve.openai.chat import serve_chat
from quire.serve.openai.completions import serve_completion
from quire.serve.openai.embeddings import serve_embeddings
from quire.serve.openai.pooling import serve_pooling
from quire.serve.openai.responses import serve_responses
from quire.serve.openai.scoring import serve_rerank, serve_score
from quire.serve.openai.tokens import serve_detokenize, serve_tokenize
from quire.serve.ops.adapters import serve_load_adapter, serve_unload_adapter
from quire.serve.ops.administration import (
    serve_is_sleeping,
    serve_reset_prefix_cache,
    serve_sleep,
    serve_wake_up,
)
from quire.serve.ops.explanation import serve_explanation
from quire.serve.ops.observation import (
    serve_engine,
    serve_health,
    serve_load,
    serve_metrics,
    serve_model,
    serve_models,
    serve_server_load,
    serve_version,
)
from quire.serve.ops.openapi import ApiDocument
from quire.serve.page.assets import FILES, Asset
from quire.serve.state import ServerState

logger = logging.getLogger("quire.serve")
access_logger = logging.getLogger("quire.access")

Handler = Callable[[ServerState, Exchange], Awaitable[None]]

ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "/health", serve_health),
    ("GET", "/ping", serve_health),
    ("POST", "/ping", serve_health),
    ("GET", "/metrics", serve_metrics),
    ("GET", "/load", serve_server_load),
    ("GET", "/version", serve_version),
    ("GET", "/v1/models", serve_models),
    ("GET", "/v1/models/{model:path}", serve_model),
    ("POST", "/v1/load_lora_adapter", serve_load_adapter),
    ("POST", "/v1/unload_lora_adapter", serve_unload_adapter),
    ("GET", "/v1/engine", serve_engine),
    ("GET", "/v1/requests/{request_id}/explain", serve_explanation),
    ("GET", "/v1/load", serve_load),
    ("POST", "/v1/chat/completions", serve_chat),
    ("POST", "/v1/completions", serve_completion),
    ("POST", "/v1/embeddings", serve_embeddings),
    ("POST", "/v1/score", serve_score),
    ("POST", "/score", serve_score),
    ("POST", "/rerank", serve_rerank),
    ("POST", "/v1/rerank", serve_rerank),
    ("POST", "/v2/rerank", serve_rerank),
    ("POST", "/pooling", serve_pooling),
    ("POST", "/v1/responses", serve_responses),
    ("POST", "/v1/messages", serve_messages),
    ("POST", "/v1/messages/count_tokens", serve_count_tokens),
    ("POST", "/api/chat", serve_ollama_chat),
    ("POST", "/api/generate", serve_ollama_generate),
    ("POST", "/api/embed", serve_ollama_embed),
    ("POST", "/api/embeddings", serve_ollama_embeddings),
    ("POST", "/api/show", serve_ollama_show),
    ("GET", "/api/tags", serve_ollama_tags),
    ("GET", "/api/ps", serve_ollama_ps),
    ("GET", "/api/version", serve_ollama_version),
    ("POST", "/v1/files", serve_file_upload),
    ("GET", "/v1/files", serve_files),
    ("GET", "/v1/files/{file_id}", serve_file),
    ("DELETE", "/v1/files/{file_id}", serve_file_delete),
    ("GET", "/v1/files/{file_id}/content", serve_file_content),
    ("POST", "/v1/batches", serve_batch_create),
    ("GET", "/v1/batches", serve_batches),
    ("GET", "/v1/batches/{batch_id}", serve_batch),
    ("POST", "/v1/batches/{batch_id}/cancel", serve_batch_cancel),
    ("POST", "/reset_prefix_cache", serve_reset_prefix_cache),
    ("POST", "/sleep", serve_sleep),
    ("POST", "/wake_up", serve_wake_up),
    ("GET", "/is_sleeping", serve_is_sleeping),
    ("POST", "/tokenize", serve_tokenize),
    ("POST", "/detokenize", serve_detokenize),
]
"""Every endpoint but the web page's files."""
ROUTES.append(("GET", "/openapi.json", ApiDocument(ROUTES)))

PATHS = tuple(path for path in dict.fromkeys(path for _, path, _ in ROUTES) if "{" not in path)
"""What a mistyped path may have meant."""

PROBES = frozenset({"/health", "/ping"})
"""Answered under any name, as balancers and supervisors ask by address: they say no more than that the server lives."""

OPEN_PATHS = PROBES | frozenset(FILES)
"""Paths that need no key: they hold nothing of a model or a user."""

QUIET_ROUTES = frozenset({*PROBES, "/metrics", "/v1/engine", "/v1/load", "/load", *FILES})
"""Polled routes and files, left out of the access log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A route's handlers, by method, as an ASGI application."""

    state: ServerState
    route: str
    handlers: dict[str, Handler]

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        """Run the handler on the exchange that the gate made."""
        exchange: Exchange = scope["quire.exchange"]
        exchange.route = self.route
        method = exchange.scope["method"]
        await self.handlers["GET" if method == "HEAD" else method](self.state, exchange)


class App:
    """The server's ASGI application."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        if state.store is not None:
            worker = BatchWorker(state, self.answer_inside, state.store)
            state.at_start.append(worker.run)
        config = state.config
        self.root_path = f"{config.root_path}/".encode() if config.root_path else b""
        """The prefix that is taken off paths, with its last slash."""
        self.hosts = Hosts(config.host, config.allowed_hosts, config.cors)
        self.router = Router(_routes(state), redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request, from its first check to its answer."""
        if scope["type"] != "http":
            raise RuntimeError(f"only http is served, not {scope['type']}")
        root = self.root_path
        if root and scope["raw_path"].startswith(root):
            scope["raw_path"] = scope["raw_path"][len(root) - 1 :]
        exchange = Exchange(scope, receive, send)
        began_s = time.monotonic()
        refusal = await self._run(exchange)
        if refusal is not None:
            await exchange.refuse(refusal)
            _let_go(refusal)
        exchange.settle()
        self.state.metrics.count_answer(exchange.route, scope["method"], exchange.status)
        if exchange.client_left:
            self.state.metrics.count_lost_client(exchange.route)
        if self.state.config.access_log and exchange.route not in QUIET_ROUTES:
            line = (scope["method"], exchange.route, exchange.status, time.monotonic() - began_s, exchange.request_id)
            access_logger.info("%s %s %d %.3f s req_%s%s", *line, ", client left" if exchange.client_left else "")

    async def answer_inside(self, exchange: Exchange) -> None:
        """Answer a request that this server asks itself, whose sender was checked before."""
        refusal = await self._run(exchange, is_inside=True)
        if refusal is not None:
            await exchange.refuse(refusal)

    async def _run(self, exchange: Exchange, *, is_inside: bool = False) -> Refusal | None:
        """Check and route; what goes wrong comes back as the answer to give."""
        exchange.scope["quire.exchange"] = exchange
        exchange.scope["app"] = self
        exchange.scope["path"] = exchange.path
        self.state.loop_monitor.enter()
        try:
            if not is_inside:
                self.hosts.check_host(exchange, is_probe=exchange.path in PROBES)
                self.hosts.check_origin(exchange)
                allowance = self.hosts.preflight(exchange)
                if allowance is not None:
                    await exchange.respond(204, b"", headers=allowance)
                    return None
                self._check_key(exchange)
            exchange.ignored.is_strict = asks_strict(exchange.header(STRICT_HEADER)) or self.state.config.strict
            await self.router(exchange.scope, exchange.receive, exchange.send)
        except Refusal as refusal:
            return naming_models(refusal, self.state.model_names)
        except ClientGone as gone:
            _let_go(gone)
            return None
        except HTTPException as error:
            return _http_refusal(error, exchange)
        except QuireError as error:
            if isinstance(error, EngineDead):
                self.state.engine_lost.set()
            _let_go(error)
            return refusal_of(error)
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            return internal_error()
        finally:
            self.state.loop_monitor.leave()
            self.state.note_ignored(exchange.ignored)
            del exchange.scope["quire.exchange"], exchange.scope["app"]  # cycles, which only the collector would end
        return None

    def _check_key(self, exchange: Exchange) -> None:
        """Note whose key came. Raises a 401 Refusal without exactly one good key."""
        keys = self.state.keys
        if keys.is_open or exchange.path in OPEN_PATHS:
            return
        plain_header = exchange.dialect.plain_key_header
        given = exchange.header(b"authorization")
        plain = [] if plain_header is None else exchange.header(plain_header)
        good = len(given) + len(plain) > 0 and len(given) <= 1 and len(plain) <= 1
        for value in given:
            scheme, _, key = value.partition(b" ")
            good &= scheme.lower() == b"bearer"
            plain.append(key)
        tenants = {keys.find(key) for key in plain}
        tenant = tenants.pop() if len(tenants) == 1 else None
        if good and tenant is not None:
            exchange.tenant = tenant
        else:
            or_plain = "" if plain_header is None else f" or '{plain_header.decode()}: KEY'"
            said = "This server does not know the API key that was sent" if good else "This server needs an API key"
            raise Refusal(
                401,
                f"{said}: send 'Authorization: Bearer KEY'{or_plain}.",
                code="invalid_api_key",
                headers=[(b"www-authenticate", b"Bearer")],
            )


def _routes(state: ServerState) -> list[Route]:
    table: list[tuple[str, str, Handler]] = list(ROUTES)
    if not state.config.disable_page:
        table += [("GET", path, Asset.load(name, media_type)) for path, (name, media_type) in FILES.items()]
    by_path: dict[str, dict[str, Handler]] = {}
    for method, path, handler in table:
        by_path.setdefault(path, {})[method] = handler
    return [Route(path, Endpoint(state, path, handlers), methods=list(handlers)) for path, handlers in by_path.items()]


def _let_go(error: BaseException | None) -> None:
    """Take the frames away from an exception that was dealt with: they hold it in turn, and all of the request."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _not_found(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise no_such_path(scope["quire.exchange"].path, PATHS)


def _http_refusal(error: HTTPException, exchange: Exchange) -> Refusal:
    """Starlette's router raises HTTPException for a wrong method."""
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    if error.status_code == 405:
        return wrong_method(exchange.path, exchange.scope["method"], headers)
    return Refusal(error.status_code, "The request was refused.", headers=headers)
