"""Types of JSON bodies as JSON schemas, with the bounds that the checks behind the types have.

Owns the wording of types and the table of bounds. Does not own the checks (`openai/validation.py`, ...).
Invariant: a value that a schema here excludes is refused; one that it allows may still be too much for the model.
Fields that a schema does not know are ignored, and excluded where the server is strict.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from quire.core.sampling import SamplingParams
from quire.serve.anthropic.input import MAX_TEMPERATURE
from quire.serve.batch.lines import ENDPOINTS
from quire.serve.ollama.input import LATEST
from quire.serve.openai.conversation import MAX_MESSAGES, MAX_NAME_CHARS, MAX_TOOLS
from quire.serve.openai.responses_schema import CallItem, CallOutputItem, MessageItem, ReasoningItem
from quire.serve.openai.schema import JsonObject, SamplingFields
from quire.serve.openai.validation import MAX_LABEL_CHARS, MAX_METADATA, MAX_METADATA_KEY_CHARS


def bounds_of(params: type[msgspec.Struct]) -> dict[str, JsonObject]:
    """Field of `params` → bounds and meaning, as they stand there."""
    properties = msgspec.json.schema(params)["$defs"][params.__name__]["properties"]
    found = {}
    for name, schema in properties.items():
        values = next((one for one in schema.get("anyOf", ()) if one != {"type": "null"}), schema)
        dropped = ("type", "default", "$ref", "enum")
        found[name] = {"description": schema["description"], **values}
        found[name] = {word: value for word, value in found[name].items() if word not in dropped}
    return found


SAMPLING: dict[str, JsonObject] = bounds_of(SamplingParams)
_LABEL: JsonObject = {"maxLength": MAX_LABEL_CHARS}
_NAME: JsonObject = {"maxLength": MAX_NAME_CHARS}
_FUNCTION_NAME: JsonObject = {"pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_OBJECT: JsonObject = {"type": "object"}
_OBJECT_OR_NULL: JsonObject = {"type": ["object", "null"]}
_METADATA: JsonObject = {
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
    "additionalProperties": {"type": "string", **_LABEL},
}
_TOOL_CHOICE: JsonObject = {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT_OR_NULL]}


def _bounds(name: str) -> JsonObject:
    """Those of a parameter without its meaning, for a field of another one."""
    return {word: value for word, value in SAMPLING[name].items() if word != "description"}


BOUNDS: dict[str, JsonObject] = {
    **{name: SAMPLING[name] for name in SamplingFields.__struct_fields__ if name in SAMPLING},
    "thinking_token_budget": SAMPLING["thinking_token_budget"],
    "CompletionRequest.logprobs": SAMPLING["logprobs"],
    "best_of": _bounds("n"),
    "MessagesRequest.temperature": SAMPLING["temperature"] | {"maximum": MAX_TEMPERATURE},
    "stop": {
        "description": SAMPLING["stop"]["description"],
        "anyOf": [SAMPLING["stop"]["items"], {"type": "array", **_bounds("stop")}, {"type": "null"}],
    },
    "stop_sequences": SAMPLING["stop"],
    "tokens": {"items": SAMPLING["stop_token_ids"]["items"]},
    "logit_bias": SAMPLING["logit_bias"] | {"propertyNames": {"pattern": "^[0-9]+$"}},
    "CompletionRequest.max_tokens": SAMPLING["max_tokens"] | {"minimum": 0},
    "max_completion_tokens": SAMPLING["max_tokens"],
    "max_output_tokens": SAMPLING["max_tokens"],
    "top_logprobs": _bounds("logprobs"),
    "dimensions": {"minimum": 1},
    "Thinking.budget_tokens": SAMPLING["thinking_token_budget"],
    "user": _LABEL,
    "safety_identifier": _LABEL,
    **{f"{one}Request.metadata": _METADATA for one in ("Responses", "Batch")},
    "MessageMetadata.user_id": _LABEL,
    "encoding_format": {"enum": ["float", "base64", None]},
    "pooling": {"enum": ["last", "mean", None]},
    "messages": {"minItems": 1, "maxItems": MAX_MESSAGES},
    "OllamaChatRequest.messages": {"maxItems": MAX_MESSAGES},
    "tools": {"maxItems": MAX_TOOLS},
    "ToolCall.type": {"enum": ["function", None]},
    **{f"{role}Message.name": _NAME for role in ("System", "Developer", "User", "Assistant", "Tool")},
    "FunctionTool.name": _FUNCTION_NAME,
    "ResponsesTool.name": _FUNCTION_NAME,
    "MessagesTool.name": _FUNCTION_NAME,
    "FunctionTool.parameters": _OBJECT_OR_NULL,
    "ResponsesTool.parameters": _OBJECT_OR_NULL,
    "MessagesTool.input_schema": _OBJECT_OR_NULL,
    "ToolUseBlock.input": _OBJECT,
    "ChatRequest.tool_choice": _TOOL_CHOICE,
    "ResponsesRequest.tool_choice": _TOOL_CHOICE,
    "ToolChoice.type": {"enum": ["auto", "any", "tool", "none"]},
    "MessageParam.role": {"enum": ["user", "assistant"]},
    "MessageItem.role": {"enum": ["user", "assistant", "system", "developer"]},
    "MessageItem.type": {"enum": ["message", None]},
    "CallItem.type": {"const": "function_call"},
    "CallOutputItem.type": {"const": "function_call_output"},
    "ReasoningItem.type": {"const": "reasoning"},
    "BatchRequest.completion_window": {"const": "24h"},
    "BatchRequest.endpoint": {"enum": list(ENDPOINTS)},
}
"""`field`, or `Type.field` where a type differs → keywords that replace those of the field's type."""

ITEMS = (MessageItem, CallItem, CallOutputItem, ReasoningItem)
"""What an entry of `ResponsesRequest.input` is; there it stays bytes until its `type` is known."""


class TypeSchemas:
    """JSON schemas of types, and of the types inside them under `components`."""

    def __init__(self, model_names: tuple[str, ...], *, is_strict: bool = False) -> None:
        self.components: dict[str, JsonObject] = {}
        """Name of a type → its schema."""
        self._names = list(model_names)
        self._is_strict = is_strict

    def of(self, kind: Any) -> JsonObject:
        """Schema of a Python type, by reference where it has a name."""
        return self._schema(inspect.type_info(kind))

    def _schema(self, kind: inspect.Type) -> JsonObject:
        match kind:
            case inspect.StructType():
                return self._reference(kind)
            case inspect.UnionType():
                return self._union(kind)
            case inspect.ListType():
                return {"type": "array", "items": self._schema(kind.item_type)}
            case inspect.DictType():
                return {"type": "object", "additionalProperties": self._schema(kind.value_type)}
            case inspect.LiteralType():
                return {"enum": list(kind.values)}
            case inspect.AnyType() | inspect.RawType():
                return {}
        return {"type": _SCALARS[type(kind)]}

    def _union(self, kind: inspect.UnionType) -> JsonObject:
        """Where a struct is one of several, its tag must be there."""
        structs = [one for one in kind.types if isinstance(one, inspect.StructType)]
        schemas = [self._schema(one) for one in kind.types]
        if len(structs) > 1:
            tags = [one.tag_field if isinstance(one, inspect.StructType) else None for one in kind.types]
            schemas = [one | ({"required": [tag]} if tag else {}) for one, tag in zip(schemas, tags, strict=True)]
        return _joined(schemas)

    def _reference(self, kind: inspect.StructType) -> JsonObject:
        name = kind.cls.__name__
        if name not in self.components:
            self.components[name] = {}  # a type may hold itself
            self.components[name] = self._struct(kind)
        return {"$ref": f"#/components/schemas/{name}"}

    def _struct(self, kind: inspect.StructType) -> JsonObject:
        name = kind.cls.__name__
        properties: dict[str, JsonObject] = {}
        if kind.tag_field is not None:
            properties[kind.tag_field] = {"const": kind.tag}
        for field in kind.fields:
            properties[field.encode_name] = self._field(name, field)
        required = [field.encode_name for field in kind.fields if field.required]
        found: JsonObject = {"type": "object", "properties": properties}
        if kind.cls.__doc__:
            found["description"] = kind.cls.__doc__.partition("\n")[0]
        if required:
            found["required"] = required
        if kind.forbid_unknown_fields:
            found["additionalProperties"] = not self._is_strict
        return found

    def _field(self, owner: str, field: inspect.Field) -> JsonObject:
        if field.name == "model":
            nothing = [] if field.required else [None]
            tagged = [f"{name}{LATEST}" for name in self._names] if owner.startswith("Ollama") else []
            return {"enum": [*self._names, *tagged, *nothing]}
        if (owner, field.name) == ("ResponsesRequest", "input"):
            items = {"type": "array", "items": {"anyOf": [self.of(item) for item in ITEMS]}}
            return {"anyOf": [{"type": "string"}, items]}
        if field.name == "options" and owner.startswith("OllamaEmbed"):
            return _OBJECT_OR_NULL  # vectors have no sampling: whatever they say is ignored
        schema = self._schema(field.type)
        bounds = BOUNDS.get(f"{owner}.{field.name}", BOUNDS.get(field.name, {}))
        if bounds.keys() & {"anyOf", "enum", "const", "type"}:
            return dict(bounds)
        return _bounded(schema, bounds)


_SCALARS: dict[type[inspect.Type], str] = {
    inspect.NoneType: "null",
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
}


def _bounded(schema: JsonObject, bounds: JsonObject) -> JsonObject:
    """`bounds` beside a plain type, or inside the one of several types that is no null."""
    if "anyOf" not in schema:
        return schema | bounds
    described = {word: bounds[word] for word in ("description",) if word in bounds}
    bounds = {word: value for word, value in bounds.items() if word not in described}
    inner = [one if one == {"type": "null"} else one | bounds for one in schema["anyOf"]]
    return {"anyOf": inner, **described}


def _joined(schemas: list[JsonObject]) -> JsonObject:
    """One of several; scalars without more are one `type`."""
    if all(set(one) == {"type"} for one in schemas):
        return {"type": [one["type"] for one in schemas]}
    return {"anyOf": schemas}
