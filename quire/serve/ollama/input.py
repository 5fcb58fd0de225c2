"""From a request of Ollama's API to chat's: the same fields under chat's names, checked there.

Owns what has no counterpart in chat, and what each field is called in a client's words. Does not own the checks that
both share (`openai/`). Invariant: a refusal names the field as the client knows it.
"""

from __future__ import annotations

from quire.core.errors import shown
from quire.core.sampling import SamplingParams
from quire.serve.http.refusal import bad_request, unsupported
from quire.serve.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaToolCall,
)
from quire.serve.openai.conversation import MAX_MESSAGES
from quire.serve.openai.naming import Translated
from quire.serve.openai.schema import (
    AssistantMessage,
    ChatRequest,
    FunctionCall,
    JsonObject,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from quire.serve.openai.tooling import DEFAULT_EFFORT, MessageStyle, cannot_ask

LATEST = ":latest"
EFFORTS = ("low", "medium", "high")
OPTION_NAMES = {
    **{name: name for name in OllamaOptions.__struct_fields__ if name in SamplingParams.__struct_fields__},
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
}
"""Chat's field → the option."""

Names = dict[str, str]


def served_name(name: str, names: tuple[str, ...]) -> str:
    """The name without the tag ":latest", which says nothing, unless the model is served under just this name."""
    return name if name in names else name.removesuffix(LATEST)


def translate_chat(body: OllamaChatRequest, model: str) -> Translated:
    """Raises a 400 Refusal that names the field at fault."""
    names: Names = {"prompt": "messages"}
    given = body.messages or []
    if len(given) > MAX_MESSAGES:
        raise bad_request(f"messages has {len(given)} entries: it must have 1 to {MAX_MESSAGES}.", "messages")
    messages = _messages(given)
    is_open = isinstance(messages[-1], AssistantMessage)
    chat = ChatRequest(
        model=model,
        messages=messages,
        tools=body.tools or None,
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
    )
    _add_shared(chat, body, names)
    return Translated(chat, names)


def translate_generate(body: OllamaGenerateRequest, model: str) -> Translated:
    """The prompt, after `system` if that is given, as a conversation. Raises a 400 Refusal as above."""
    names: Names = {"messages": "prompt", "messages[0]": "prompt"}
    messages: list[Message] = []
    if body.system:
        names |= {"messages[0]": "system", "messages[1]": "prompt"}
        messages.append(SystemMessage(content=body.system))
    messages.append(UserMessage(content=body.prompt or ""))
    chat = ChatRequest(model=model, messages=messages)
    _add_shared(chat, body, names)
    return Translated(chat, names)


def check_generate(body: OllamaGenerateRequest) -> None:
    """400 for what /api/generate has and no model here can do, or what excludes each other."""
    if body.suffix:
        raise unsupported("suffix", "text insertion is not implemented.")
    if body.template:
        raise unsupported("template", "templates come from the server's operator only.")
    if body.context:
        raise unsupported("context", "send the conversation itself, to /api/chat.")
    for name in ("width", "height", "steps"):
        if getattr(body, name):
            raise unsupported(name, "the model makes no images.")
    check_images(body.images, "images")
    if body.raw and (body.system or body.think):
        name = "system" if body.system else "think"
        raise bad_request(f"{name} is for the chat template, which raw switches off: leave one of them out.", name)


def check_images(images: list[str] | None, where: str) -> None:
    """400 for images: models are of text alone."""
    if images:
        raise unsupported(where, "the model sees no images.")


def add_options(chat: ChatRequest, options: OllamaOptions | None, names: Names) -> None:
    """Sampling in chat's words. What a request leaves out the checkpoint decides, as in chat."""
    names |= {ours: f"options.{theirs}" for ours, theirs in OPTION_NAMES.items()}
    if options is None:
        return
    _check_samplers(options)
    for ours, theirs in OPTION_NAMES.items():
        setattr(chat, ours, getattr(options, theirs))
    if options.num_predict is not None and options.num_predict <= 0:
        if options.num_predict < -2:
            limit = "at least 1, or 0, -1 or -2 for what the context holds"
            raise bad_request(f"options.num_predict = {options.num_predict} must be {limit}.", "options.num_predict")
        chat.max_tokens = None
    chat.seed = None if options.seed == -1 else options.seed
    if options.repeat_last_n == 0:
        chat.repetition_penalty = 1.0


def _check_samplers(options: OllamaOptions) -> None:
    """400 for a sampler that is not there, unless its value switches it off."""
    off = {"typical_p": 1.0, "tfs_z": 1.0, "mirostat": 0}
    for name, value in off.items():
        given = getattr(options, name)
        if given is not None and given != value:
            raise unsupported(f"options.{name}", f"only {value:g} is, which switches it off.")
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_penalty not in (None, 1.0):
        raise unsupported("options.repeat_last_n", "repeat_penalty looks at the whole text: leave it out, or -1.")
    if options.num_ctx is not None and options.num_ctx < 0:
        raise bad_request(f"options.num_ctx = {options.num_ctx} must be at least 0.", "options.num_ctx")
    if options.embedding_only or options.vocab_only or options.logits_all:
        name = next(one for one in ("embedding_only", "vocab_only", "logits_all") if getattr(options, one))
        raise unsupported(f"options.{name}", "only false is.")


def _add_shared(chat: ChatRequest, body: OllamaChatRequest | OllamaGenerateRequest, names: Names) -> None:
    check_logprobs(body)
    add_options(chat, body.options, names)
    names |= {"reasoning_effort": "think", "chat_template_kwargs": "think", "tool_choice": "tools"}
    names |= {"response_format": "format", "response_format.json_schema": "format"}
    names |= {"structured_outputs": "format" if body.format else "tools", "structured_outputs.json": "format"}
    names |= {"structured_outputs.calls": "tools", "continue_final_message": "messages"}
    chat.response_format = response_format(body.format)
    chat.reasoning_effort = _effort(body.think)
    chat.stream = body.stream is not False


def check_logprobs(body: OllamaChatRequest | OllamaGenerateRequest) -> None:
    """400 where log-probabilities are wanted."""
    if body.logprobs or body.top_logprobs:
        name = "logprobs" if body.logprobs else "top_logprobs"
        raise unsupported(name, "ask /v1/chat/completions or /v1/completions for them.")


def response_format(form: JsonObject | str | None) -> JsonObject | None:
    """`"json"` or a schema, in chat's words. Raises a 400 Refusal for another word."""
    if isinstance(form, str) and form not in ("", "json"):
        raise bad_request(f'format = {shown(form)} is not allowed: it must be "json" or a JSON schema.', "format")
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "output", "strict": True, "schema": form}}
    return {"type": "json_object"} if form == "json" else None


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, str):
        if think not in EFFORTS:
            raise bad_request(f"think = {shown(think)} must be true, false, {', '.join(EFFORTS)}.", "think")
        return think
    return None if think is None else DEFAULT_EFFORT if think else "none"


def check_think(think: bool | str | None, style: MessageStyle) -> None:
    """400 for a `think` that the chat template cannot be asked for. The default level asks for nothing."""
    effort = _effort(think)
    if effort is not None and effort not in style.efforts and think != DEFAULT_EFFORT:
        value = str(think).lower() if isinstance(think, bool) else shown(think)
        raise cannot_ask("think", value, style, {"none": "false", DEFAULT_EFFORT: "true"})


def _messages(given: list[OllamaMessage]) -> list[Message]:
    """Ollama's turns as chat's. Calls get ids; a result without one answers the first open call, of its name if it
    says one."""
    found: list[Message] = []
    open_calls: dict[str, str] = {}
    for index, turn in enumerate(given):
        where = f"messages[{index}]"
        check_images(turn.images, f"{where}.images")
        match turn.role:
            case "system":
                found.append(SystemMessage(content=turn.content or ""))
            case "user":
                found.append(UserMessage(content=turn.content or ""))
            case "assistant":
                message = _assistant(turn, where)
                open_calls = {call.id: call.function.name for call in message.tool_calls or []}
                found.append(message)
            case "tool":
                call_id = _answered(turn, open_calls)
                open_calls.pop(call_id, None)
                found.append(ToolMessage(content=turn.content or "", tool_call_id=call_id))
            case _:
                allowed = "system, user, assistant or tool"
                raise bad_request(
                    f"{where}.role = {shown(turn.role)} is not allowed: it must be {allowed}.", f"{where}.role"
                )
    return found


def _answered(turn: OllamaMessage, open_calls: dict[str, str]) -> str:
    """The id of the call that a result answers; one that is no call's is refused by chat's check of the order."""
    if turn.tool_call_id is not None:
        return turn.tool_call_id
    named = (one for one, name in open_calls.items() if turn.tool_name in (None, "", name))
    return next(named, "")


def _assistant(turn: OllamaMessage, where: str) -> AssistantMessage:
    calls = [_call(call, f"{where}.tool_calls[{at}]", at) for at, call in enumerate(turn.tool_calls or [])]
    content = turn.content if turn.content or not calls else None
    return AssistantMessage(
        content=content or (None if calls else ""),
        reasoning_content=turn.thinking or None,
        tool_calls=calls or None,
    )


def _call(call: OllamaToolCall, where: str, at: int) -> ToolCall:
    arguments = bytes(call.function.arguments)
    if not arguments.lstrip().startswith(b"{"):
        raise bad_request(f"{where}.function.arguments must be an object.", where)
    return ToolCall(id=call.id or f"call_{at:09d}", function=FunctionCall(call.function.name, arguments.decode()))
