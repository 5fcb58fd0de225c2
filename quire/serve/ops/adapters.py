"""Adapters of a running server: /v1/load_lora_adapter and /v1/unload_lora_adapter, by vLLM's names.

Owns the bodies and the answers. Does not own who may ask (`administration.check_operator`) nor what an adapter is
(`engine/adapters.py`).
"""

from __future__ import annotations

import msgspec

from quire.core.adapters import LoRARequest, check_adapter_name
from quire.core.errors import InvalidParameter, RequestError
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import Refusal, bad_request, refusal_of
from quire.serve.ops.administration import check_operator
from quire.serve.state import ServerState


class LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter to load."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadBody(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter to take out."""

    lora_name: str
    lora_int_id: int | None = None


_LOAD: BodyDecoder[LoadBody] = BodyDecoder(LoadBody)
_UNLOAD: BodyDecoder[UnloadBody] = BodyDecoder(UnloadBody)


async def serve_load_adapter(state: ServerState, exchange: Exchange) -> None:
    """Load an adapter from a folder inside --lora-root."""
    state.check_open()
    check_operator(exchange)
    body = await state.read(exchange, _LOAD)
    try:
        await state.llm.add_lora(LoRARequest(body.lora_name, 1, body.lora_path, bool(body.load_inplace)))
    except InvalidParameter as error:
        raise refusal_of(error) from None
    except RequestError as error:
        param = error.param if error.param == "lora_name" else "lora_path"  # or a key of what is there
        raise bad_request(error.message, param, "adapter_not_loaded") from None
    text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
    await exchange.respond(200, text.encode(), b"text/plain; charset=utf-8")


async def serve_unload_adapter(state: ServerState, exchange: Exchange) -> None:
    """Take the name of an adapter away; requests that run go on."""
    state.check_open()
    check_operator(exchange)
    body = await state.read(exchange, _UNLOAD)
    try:
        check_adapter_name(body.lora_name)
        await state.llm.remove_lora(body.lora_name)
    except InvalidParameter as error:
        raise refusal_of(error) from None
    except RequestError as error:
        raise Refusal(404, error.message, param="lora_name", code="adapter_not_found") from None
    text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
    await exchange.respond(200, text.encode(), b"text/plain; charset=utf-8")
