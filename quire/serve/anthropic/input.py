"""From Anthropic's messages to the conversation that chat has. Owns the meaning of blocks and their order.

Does not own the rules of a conversation (`openai/conversation.py`) nor of sampling: they see a `ChatRequest`.
Invariant: whatever they refuse is named by the client's own field, through `Translated.names`.
"""

from __future__ import annotations

from quire.core.errors import listed, shown
from quire.serve.anthropic.schema import (
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    TextBlock,
    ThinkingBlock,
    Thread,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.serve.http.dialect import THREAD_NOT_FOUND
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import Refusal, bad_request, unsupported
from quire.serve.openai.naming import Translated
from quire.serve.openai.schema import (
    AssistantMessage,
    ChatRequest,
    FunctionCall,
    FunctionTool,
    JsonObject,
    Message,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)

MAX_MESSAGES = 4096
MAX_TEMPERATURE = 1.0
FORMAT = "output_config.format"
_CUSTOM = (None, "custom")
"""Types of tools that have a schema."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Names = dict[str, str]


def translate(body: CountTokensRequest, ignored: IgnoredParams) -> Translated:
    """Raises a 400 Refusal that names the field at fault. ignored: takes what does nothing here."""
    if body.thread is not None:
        _check_thread(body.thread, ignored)
    names: Names = {"prompt": "messages", "max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
    names |= {"response_format": FORMAT, "response_format.json_schema": FORMAT}
    names |= {
        "structured_outputs.json": f"{FORMAT}.schema",
        "structured_outputs": FORMAT if _is_shaped(body) else "tools",
    }
    names |= {"structured_outputs.calls": "tools", "reasoning_effort": "output_config.effort"}
    names["thinking_token_budget"] = "thinking.budget_tokens"
    messages = _messages(body, names)
    choice = body.tool_choice
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(tool, index, names) for index, tool in enumerate(body.tools or [])] or None,
        tool_choice=None if choice is None else _tool_choice(choice, body.tools or []),
        response_format=_response_format(body),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        add_generation_prompt=not isinstance(messages[-1], AssistantMessage),
        continue_final_message=isinstance(messages[-1], AssistantMessage),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        thinking=body.thinking,
    )
    if isinstance(body, MessagesRequest):
        _add_sampling(chat, body, names)
    return Translated(chat, names)


def _check_thread(thread: Thread, ignored: IgnoredParams) -> None:
    """Nothing is kept: one that begins does no harm; for one that goes on the client has to send everything again."""
    if thread.type == "create":
        return ignored.note("thread")
    if thread.type == "continue":
        raise Refusal(
            404,
            f"thread.previous_message_id = {shown(thread.previous_message_id)} is not known: this server keeps no "
            "conversations; send all messages, system and tools.",
            param="thread",
            code=THREAD_NOT_FOUND,
        )
    kinds = "it must be create or continue"
    raise bad_request(f"thread.type = {shown(thread.type)} is not allowed: {kinds}.", "thread.type")


def _add_sampling(chat: ChatRequest, body: MessagesRequest, names: Names) -> None:
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise bad_request(f"temperature = {body.temperature:g} is not allowed: it must be 0 to 1.", "temperature")
    names["user"] = "metadata.user_id"
    chat.max_tokens = body.max_tokens
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.user = None if body.metadata is None else body.metadata.user_id
    chat.priority, chat.cache_salt = body.priority, body.cache_salt


def _messages(body: CountTokensRequest, names: Names) -> list[Message]:
    if not 0 < len(body.messages) <= MAX_MESSAGES:
        raise bad_request(f"messages has {len(body.messages)} entries: it must have 1 to {MAX_MESSAGES}.", "messages")
    messages: list[Message] = []
    if body.system:
        names["messages[0]"] = "system"
        messages.append(SystemMessage(content=_text(body.system)))
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        for message in _turn(turn, where):
            names[f"messages[{len(messages)}]"] = where
            messages.append(message)
    return messages


def _turn(turn: MessageParam, where: str) -> list[Message]:
    """One turn as chat's messages: the results of tools stand alone there, before what the user says besides."""
    if turn.role == "assistant":
        return [_assistant(turn.content, where)]
    if turn.role != "user":
        raise bad_request(
            f"{where}.role = {shown(turn.role)} is not allowed: it must be user or assistant.", f"{where}.role"
        )
    if isinstance(turn.content, str):
        return [UserMessage(content=turn.content)]
    results: list[Message] = []
    texts: list[TextPart] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            results.append(ToolMessage(content=_text(block.content or ""), tool_call_id=block.tool_use_id))
        elif isinstance(block, TextBlock):
            texts.append(TextPart(block.text))
        else:
            raise bad_request(f"{where}.content: a user's turn has text and tool_result only.", f"{where}.content")
    return [*results, UserMessage(content=texts)] if texts or not results else results


def _assistant(
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock], where: str
) -> AssistantMessage:
    if isinstance(content, str):
        return AssistantMessage(content=content)
    if any(isinstance(block, ToolResultBlock) for block in content):
        raise bad_request(f"{where}.content: results of tools belong to a user's turn.", f"{where}.content")
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    calls = [_call(block, where) for block in content if isinstance(block, ToolUseBlock)]
    return AssistantMessage(
        content="".join(texts) if texts else None,
        reasoning_content="\n".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )


def _call(block: ToolUseBlock, where: str) -> ToolCall:
    arguments = bytes(block.input)
    if not arguments.lstrip().startswith(b"{"):
        raise bad_request(f"{where}.content: the input of a tool_use must be an object.", f"{where}.content")
    return ToolCall(id=block.id, function=FunctionCall(block.name, arguments.decode()))


def _is_shaped(body: CountTokensRequest) -> bool:
    return body.output_config is not None and body.output_config.format is not None


def _response_format(body: CountTokensRequest) -> JsonObject | None:
    """A JSON schema without a name here."""
    shape = None if body.output_config is None else body.output_config.format
    if shape is None:
        return None
    if shape.get("type") != "json_schema":
        raise unsupported(FORMAT, f"only the type json_schema is, not {shown(shape.get('type'))}.")
    schema = {key: value for key, value in shape.items() if key != "type"}
    return {"type": "json_schema", "json_schema": {"name": "output", "strict": True, **schema}}


def _text(content: str | list[TextBlock]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart(block.text) for block in content]


def _tool(tool: MessagesTool, index: int, names: Names) -> Tool:
    where = f"tools[{index}]"
    names[f"{where}.function"] = where
    names[f"{where}.function.parameters"] = f"{where}.input_schema"
    function = FunctionTool(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function" if tool.type in _CUSTOM else str(tool.type), function=function)


def _tool_choice(choice: ToolChoice, tools: list[MessagesTool]) -> str | JsonObject:
    names = [tool.name for tool in tools if tool.type in _CUSTOM]
    if choice.type in ("any", "tool") and not names:
        skipped = "; those that a server would run are skipped" if tools else ""
        raise bad_request(f"tool_choice.type = {choice.type} needs tools with an input_schema{skipped}.", "tool_choice")
    if choice.type == "tool":
        if choice.name not in names:
            raise bad_request(
                f"tool_choice.name = {shown(choice.name)} is no tool with an input_schema: there are {listed(names)}.",
                "tool_choice",
            )
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise bad_request(
            f"tool_choice.type = {shown(choice.type)} is not allowed: it must be auto, any, tool or none.",
            "tool_choice",
        )
    return _CHOICES[choice.type]
