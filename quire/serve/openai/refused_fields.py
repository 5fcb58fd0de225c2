"""Request fields that would change the answer and are not honoured, each with its reason and its no-op values.

Owns the tables, for all endpoints. A field that is neither here nor in a body's type is ignored (`http/ignored.py`).
Does not own the checks of values that are honoured in part (`validation.py`, ...).
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.sampling import SamplingParams
from quire.serve.http.unknown_fields import Refused, RefusedField
from quire.serve.openai.responses_schema import ResponsesRequest
from quire.serve.openai.schema import ChatRequest, CompletionRequest

_BEAMS = "send use_beam_search with n beams."
_TOOLS = "use tools and tool_choice."
_SAMPLER = "this sampler is not implemented."
_GRAMMAR = "use structured_outputs or response_format."
_TEXT_ONLY = "this server reads and writes text only."
_SWITCH = "put it into chat_template_kwargs, or use reasoning_effort."
_THINKING = "use reasoning_effort, thinking or thinking_token_budget."


def _clears_nothing(value: Any) -> bool:
    """Whether `context_management` keeps the whole conversation: no edits, or ones that keep all thinking."""
    edits = value.get("edits", []) if isinstance(value, dict) else None
    if not isinstance(edits, list) or set(value) - {"edits"}:
        return False
    return all(
        isinstance(edit, dict)
        and str(edit.get("type")).startswith("clear_thinking")
        and edit.get("keep") in ("all", {"type": "all"})
        for edit in edits
    )


PROMPTING: Refused = {
    "audio": RefusedField(_TEXT_ONLY),
    "chat_template": RefusedField("templates come from the server's operator only."),
    "container": RefusedField("this server runs no code."),
    "context_management": RefusedField("send the part of the conversation that matters.", is_no_op=_clears_nothing),
    "conversation": RefusedField("conversations are not kept: send all of it."),
    "documents": RefusedField("put the documents into a message."),
    "enable_thinking": RefusedField(_SWITCH, keeps_false=True),
    "function_call": RefusedField(_TOOLS, ("none", "auto")),
    "functions": RefusedField(_TOOLS),
    "images": RefusedField(_TEXT_ONLY),
    "input": RefusedField("this path takes its prompt in another field."),
    "instructions": RefusedField("send them as a system message."),
    "mcp_servers": RefusedField("this server runs no tools."),
    "messages": RefusedField("this path takes its prompt in another field."),
    "prefill": RefusedField("end messages with the beginning of the answer."),
    "previous_response_id": RefusedField("answers are not kept: send the whole conversation."),
    "prompt": RefusedField("this path takes its prompt in another field, and templates of prompts are not kept."),
    "prompt_embeds": RefusedField("send text or token ids."),
    "system": RefusedField("send it as a system message."),
    "thinking": RefusedField("it is a field of chat and messages.", ({"type": "disabled"},)),
    "thinking_budget": RefusedField(_THINKING),
    "tools": RefusedField("it is a field of chat, responses and messages."),
    "truncate_prompt_tokens": RefusedField("shorten the prompt before it is sent."),
    "truncation": RefusedField("a conversation that is too long is refused, never cut.", ("disabled", "auto")),
    **{
        f"{role}Message.{name}": RefusedField(_TEXT_ONLY)
        for role in ("User", "Tool")
        for name in ("audio", "files", "images")
    },
    "AssistantMessage.audio": RefusedField(_TEXT_ONLY),
    "AssistantMessage.function_call": RefusedField("send tool_calls."),
    "MessagesTool.input_examples": RefusedField("put examples into the description."),
}
"""What would change the prompt. `truncation: auto` does nothing where the prompt fits, and where it does not, the
request is refused for its length."""

SAMPLING: Refused = {
    "beam_width": RefusedField("n is the width: send use_beam_search with n beams."),
    "background": RefusedField("answers are not kept; use /v1/batches for work that can wait."),
    "do_sample": RefusedField("send temperature 0 for greedy choice.", (True,), keeps_false=True),
    "dry_multiplier": RefusedField(_SAMPLER, (0,)),
    "ebnf": RefusedField(_GRAMMAR),
    "epsilon_cutoff": RefusedField(_SAMPLER, (0,)),
    "eta_cutoff": RefusedField(_SAMPLER, (0,)),
    "grammar": RefusedField(_GRAMMAR),
    "inference_geo": RefusedField("this server is where it is.", ("global",)),
    "json_schema": RefusedField(_GRAMMAR),
    "logits_processors": RefusedField("code in requests is refused."),
    "lora_path": RefusedField("`model` names an adapter."),
    "lora_request": RefusedField("`model` names an adapter."),
    "max_new_tokens": RefusedField("send max_tokens."),
    "min_new_tokens": RefusedField("send min_tokens.", (0,)),
    "mirostat": RefusedField(_SAMPLER, (0,)),
    "mirostat_mode": RefusedField(_SAMPLER, (0,)),
    "modalities": RefusedField('only ["text"] is.', (["text"],)),
    "moderation": RefusedField("this server does not moderate."),
    "n_predict": RefusedField("send max_tokens."),
    "no_repeat_ngram_size": RefusedField(_SAMPLER, (0,)),
    "num_beams": RefusedField(_BEAMS, (1,)),
    "num_predict": RefusedField("send max_tokens."),
    "output_format": RefusedField("send output_config.format or response_format."),
    "reasoning": RefusedField("it is a field of responses: use reasoning_effort, thinking or thinking_token_budget."),
    "regex": RefusedField(_GRAMMAR),
    "repeat_penalty": RefusedField("send repetition_penalty.", (1,)),
    "stop_regex": RefusedField("send stop."),
    "stop_sequences": RefusedField("send stop."),
    "stop_strings": RefusedField("send stop."),
    "store": RefusedField("answers are not kept; leave it out or send false."),
    "suffix": RefusedField("text insertion is not implemented."),
    "tfs_z": RefusedField(_SAMPLER, (1,)),
    "top_a": RefusedField(_SAMPLER, (0,)),
    "typical_p": RefusedField(_SAMPLER, (1,)),
    "verbosity": RefusedField("the model's verbosity cannot be controlled here.", ("medium",)),
    "xtc_probability": RefusedField(_SAMPLER, (0,)),
    "TextOptions.verbosity": RefusedField("the model's verbosity cannot be controlled here.", ("medium",)),
}
"""What would change what is generated."""

_NO_OPS: dict[str, tuple[Any, ...]] = {
    **{
        field.name: (field.default,)
        for field in msgspec.structs.fields(SamplingParams)
        if isinstance(field.default, bool | int | float) and field.name != "max_tokens"  # whose default cuts
    },
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "length_penalty": (1,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
"""Fields of one endpoint with values that ask nothing of another."""
_EXTRAS = """early_stopping include logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids stream_options
    top_logprobs"""
_HARMLESS = frozenset(["cache_salt", "metadata", "model", "priority", "safety_identifier", "user", *_EXTRAS.split()])
"""Fields of one endpoint that change no answer of another."""
_KEEP_FALSE = frozenset(("add_generation_prompt", "parallel_tool_calls", "skip_special_tokens"))
"""Those whose false asks for something."""


_PATHS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions", ResponsesRequest: "/v1/responses"}


def _elsewhere() -> Refused:
    """Fields that some endpoints honour, for those that do not."""
    names = {name for kind in _PATHS for name in kind.__struct_fields__} - _HARMLESS
    return {name: RefusedField(_owners(name), _NO_OPS.get(name, ()), keeps_false=name in _KEEP_FALSE) for name in names}


def _owners(name: str) -> str:
    """Which paths have a field."""
    *others, last = [path for kind, path in _PATHS.items() if name in kind.__struct_fields__]
    return f"it is a field of {', '.join(others) + ' and ' * bool(others)}{last}, not of this path."


GENERATING: Refused = {**_elsewhere(), **SAMPLING, **PROMPTING}
"""For every path that generates."""
EMBEDDING: Refused = {
    "stream": RefusedField("vectors are not streamed."),
    "input_type": RefusedField("put the instruction before the text."),
    "truncate_prompt_tokens": RefusedField("shorten the prompt before it is sent."),
    "prompt_embeds": RefusedField("send text or token ids."),
    "messages": RefusedField("send texts or token ids as input."),
}
BATCHES: Refused = {"output_expires_after": RefusedField("outputs are kept until they are deleted.")}
"""For what creates a batch: a promise to delete is none that may be dropped."""
