"""From body bytes to a typed request. Owns the translation of msgspec's errors into 400s that name the field.

Invariants: any bytes give either a value or a Refusal; a client's value is repeated only in part, never whole.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from quire.core.errors import SHOWN_CHARS
from quire.serve.refusal import Refusal, bad_request, unsupported

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")

_TOOLS = "use tools and tool_choice."
REASONS = {
    "audio": "this server produces text only.",
    "context_management": "send the part of the conversation that matters.",
    "conversation": "conversations are not kept: send all of it as input.",
    "chat_template": "templates come from the server's operator only.",
    "dimensions": "vectors have the model's own size.",
    "documents": "put the documents into a message.",
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "length_penalty": "beam search is not implemented.",
    "logits_processors": "code in requests is refused.",
    "encrypted_content": "send the reasoning as content.",
    "container": "this server runs no code.",
    "inference_geo": "this server is where it is.",
    "input_examples": "put examples into the description.",
    "max_tool_calls": "this server runs no tools.",
    "mcp_servers": "this server runs no tools.",
    "moderation": "this server does not moderate.",
    "prediction": "predicted outputs are not implemented.",
    "prefill": "end messages with the beginning of the answer.",
    "prompt": "templates of prompts are not kept.",
    "prompt_cache_options": "the prefix cache is automatic.",
    "prompt_cache_retention": "the prefix cache keeps pages while there is room.",
    "prompt_embeds": "send text or token ids.",
    "suffix": "text insertion is not implemented.",
    "truncate_prompt_tokens": "shorten the prompt before it is sent.",
    "use_beam_search": "beam search is not implemented.",
    "web_search_options": "this server does not search.",
}
"""Field of type None in `schema.py` → why it is refused."""


class Decoder(Generic[T]):
    """Decodes JSON bodies of one type."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, body: bytes | msgspec.Raw, within: str = "") -> T:
        """The value. Raises a 400 Refusal whose param is the path of the field at fault, which begins with `within`."""
        if isinstance(body, bytes) and not body.strip():
            raise bad_request("The request has no body: send a JSON object.", code="invalid_json")
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _explained(str(error), within) from None
        except msgspec.DecodeError as error:
            raise bad_request(f"The body is not valid JSON: {str(error)[:SHOWN_CHARS]}.", code="invalid_json") from None
        except UnicodeDecodeError:
            raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
        except RecursionError:
            raise bad_request("The body is nested too deeply.", code="invalid_json") from None


def _explained(error: str, within: str) -> Refusal:
    """msgspec's message → 400 with `param`."""
    where = _WHERE.search(error)
    path = ".".join(filter(None, (within, where.group(1) if where else "")))
    problem = error[: where.start()] if where else error
    unknown = _UNKNOWN.match(problem)
    if unknown is not None:
        param = _joined(path, unknown.group(1)[:SHOWN_CHARS])
        return bad_request(
            f"Unknown field {param}: fields that this server does not know are refused.", param, "unknown_parameter"
        )
    missing = _MISSING.match(problem)
    if missing is not None:
        param = _joined(path, missing.group(1))
        return bad_request(f"{param} is missing.", param, "missing_required_parameter")
    param = path.removesuffix("[...]")
    if problem.startswith("Expected `null`") and param.rsplit(".", 1)[-1] in REASONS:
        return unsupported(param, REASONS[param.rsplit(".", 1)[-1]])
    if ".content[" in param and param.endswith(".type"):
        return unsupported(param, f"message parts must be text. {_cut(problem)}.")
    return bad_request(f"{param or 'The body'}: {_cut(problem)}.", param or None, "invalid_type")


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _cut(text: str) -> str:
    text = text.replace("`", "").replace(" | null", "")
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
