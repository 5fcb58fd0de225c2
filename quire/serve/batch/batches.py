"""/v1/batches: create, look, list, cancel. Owns the checks of a request; the work is `worker.py`'s."""

from __future__ import annotations

import time

import msgspec

from quire.core.errors import shown
from quire.serve.batch.files import store_of, stored
from quire.serve.batch.lines import ENDPOINTS
from quire.serve.batch.listing import list_query_of
from quire.serve.batch.schema import BatchRecord, fresh_id
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Refusal, bad_request, unsupported
from quire.serve.openai.refused_fields import BATCHES
from quire.serve.openai.validation import check_metadata
from quire.serve.state import ServerState

WINDOW = "24h"
WINDOW_S = 24 * 3600


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


_DECODER: BodyDecoder[BatchRequest] = BodyDecoder(BatchRequest, refused=BATCHES)


async def serve_batch_create(state: ServerState, exchange: Exchange) -> None:
    """Queue a batch."""
    store = store_of(state)
    body = await state.read(exchange, _DECODER)
    if body.endpoint not in ENDPOINTS:
        raise bad_request(f"endpoint = {shown(body.endpoint)} is none of {', '.join(ENDPOINTS)}.", "endpoint")
    if body.completion_window != WINDOW:
        raise unsupported("completion_window", f"only {WINDOW} is, not {shown(body.completion_window)}.")
    check_metadata(body.metadata)
    now_s = int(time.time())
    batch = BatchRecord(
        id=fresh_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=WINDOW,
        created_at=now_s,
        expires_at=now_s + WINDOW_S,
        metadata=body.metadata,
    )
    if not await stored(store, lambda disk: disk.create_batch(exchange.tenant.name, batch)):
        raise Refusal(
            404, f"There is no file {shown(body.input_file_id)} for a batch.", param="input_file_id", code="not_found"
        )
    state.batch_news.set()
    await exchange.respond_json(batch)


async def serve_batches(state: ServerState, exchange: Exchange) -> None:
    """Batches, newest first. Query: limit, after."""
    store = store_of(state)
    query = list_query_of(exchange)
    owner = exchange.tenant.name
    found = await stored(store, lambda disk: disk.batches(owner, query.after, query.limit + 1))
    await exchange.respond_json(query.listed(found))


async def serve_batch(state: ServerState, exchange: Exchange) -> None:
    """One batch."""
    store = store_of(state)
    batch_id: str = exchange.scope["path_params"]["batch_id"]
    batch = await stored(store, lambda disk: disk.batch(exchange.tenant.name, batch_id))
    await exchange.respond_json(_known(batch, batch_id))


async def serve_batch_cancel(state: ServerState, exchange: Exchange) -> None:
    """End a batch; what it has done so far stays."""
    store = store_of(state)
    batch_id: str = exchange.scope["path_params"]["batch_id"]
    batch = _known(await stored(store, lambda disk: disk.cancel_batch(exchange.tenant.name, batch_id)), batch_id)
    if batch.status not in ("cancelling", "cancelled"):
        raise bad_request(f"The batch is {batch.status}: it cannot be cancelled any more.", "batch_id")
    state.batch_news.set()
    await exchange.respond_json(batch)


def _known(batch: BatchRecord | None, batch_id: str) -> BatchRecord:
    if batch is None:
        raise Refusal(404, f"There is no batch {shown(batch_id)}.", param="batch_id", code="not_found")
    return batch
