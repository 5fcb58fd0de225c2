"""What Ollama's clients ask of a server besides text: /api/tags, /api/show, /api/ps and /api/version.

Owns the words in which the one loaded model is described. Invariant: nothing here changes anything, and no path of the
machine is told.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping

from quire.core.events import ModelFacts
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.exchange import Exchange
from quire.serve.http.refusal import MISSING, bad_request, unknown_model, unsupported
from quire.serve.ollama.input import LATEST, served_name
from quire.serve.ollama.schema import OllamaShowRequest
from quire.serve.ollama.unused import note_show
from quire.serve.openai.schema import JsonObject
from quire.serve.state import ServerState

API_VERSION = "0.13.0"
"""Of Ollama, whose API of that time is spoken: clients look whether a server is new enough for them."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model leaves memory."""
_QUOTES = '"""'
_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SHOW: BodyDecoder[OllamaShowRequest] = BodyDecoder(OllamaShowRequest)


async def serve_ollama_version(_state: ServerState, exchange: Exchange) -> None:
    """Version of Ollama's API that is spoken here, not of Quire."""
    await exchange.respond_json({"version": API_VERSION})


async def serve_ollama_tags(state: ServerState, exchange: Exchange) -> None:
    """All names of the model."""
    loaded = _time(state.started_s)
    entries = [{**_entry(state, name), "modified_at": loaded} for name in state.limits.model_names]
    await exchange.respond_json({"models": entries})


async def serve_ollama_ps(state: ServerState, exchange: Exchange) -> None:
    """The model, which is always in memory."""
    on_device = state.llm.ready.device == "cuda"
    more: JsonObject = {"expires_at": NEVER, "context_length": state.llm.max_model_len}
    more["size_vram"] = state.llm.ready.model.weight_bytes if on_device else 0
    await exchange.respond_json({"models": [{**_entry(state, state.limits.model_names[0]), **more}]})


async def serve_ollama_show(state: ServerState, exchange: Exchange) -> None:
    """What is known of one model."""
    state.check_open()
    body = await state.read(exchange, _SHOW)
    for field in ("system", "template", "options"):
        if getattr(body, field):
            raise unsupported(field, "the model is described as it is.")
    note_show(body, exchange.ignored)
    given = body.model or body.name
    if not given:
        raise bad_request("model is missing.", "model", MISSING)
    name = served_name(given, state.limits.model_names)
    if name not in state.limits.model_names:
        raise unknown_model(given, state.limits.model_names)
    llm, facts = state.llm, state.llm.ready.model
    family = facts.family
    template = None if llm.chat_template is None else llm.chat_template.sources.get("default")
    await exchange.respond_json(
        {
            "modelfile": _modelfile(name, template, llm.default_sampling),
            "parameters": "\n".join(f"{key} {value}" for key, value in llm.default_sampling.items()),
            **({} if template is None else {"template": template}),
            "details": _details(facts),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": facts.n_parameters,
                f"{family}.context_length": llm.max_model_len,
                f"{family}.embedding_length": facts.hidden_size,
            },
            "capabilities": state.style.capabilities,
            "modified_at": _time(state.started_s),
        }
    )


def _modelfile(name: str, template: str | None, parameters: Mapping[str, object]) -> str:
    """The model in the words of a Modelfile, in which a text ends at three quotation marks."""
    lines = [f"FROM {_tagged(name)}", *(f"PARAMETER {key} {value}" for key, value in parameters.items())]
    if template is not None:
        lines.append("# The chat template is written in Jinja, not in Ollama's template language.")
        is_quotable = _QUOTES not in template
        lines.append(f"TEMPLATE {_QUOTES}{template}{_QUOTES}" if is_quotable else "# It cannot be quoted in this file.")
    return "\n".join(lines) + "\n"


def _entry(state: ServerState, name: str) -> JsonObject:
    facts = state.llm.ready.model
    return {
        "name": _tagged(name),
        "model": _tagged(name),
        "size": facts.weight_bytes,
        "digest": hashlib.sha256(f"{name} {facts}".encode()).hexdigest(),
        "details": _details(facts),
    }


def _tagged(name: str) -> str:
    """Names have a tag in Ollama's lists."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _details(facts: ModelFacts) -> JsonObject:
    billions = facts.n_parameters / 1e9
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": facts.family,
        "families": [facts.family],
        "parameter_size": f"{billions:.1f}B" if billions >= 1 else f"{billions * 1000:.1f}M",
        "quantization_level": _LEVELS.get(facts.weights, facts.weights.upper()),
    }


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
