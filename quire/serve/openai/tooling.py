"""Tools and reasoning of one chat request: how the model's text will be read, and which grammar its choice needs.

Owns the meaning of `tool_choice`, `parallel_tool_calls` and `strict` together with `response_format`, and that of
`reasoning_effort`. Does not own the formats (`text/tool_calls`) nor their grammars (`text/tool_grammar`).
Invariants: a choice that forces calls is enforced by a grammar or refused by name, never merely asked of the model; an
effort is one that the chat template can ask of the model, or it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from quire.core.errors import InvalidParameter, shown
from quire.core.structured import StructuredOutputsParams
from quire.engine.async_llm import AsyncLLM
from quire.serve.config import ServerConfig
from quire.serve.http.refusal import bad_request, unsupported
from quire.serve.openai.conversation import Conversation
from quire.serve.openai.schema import ChatRequest, JsonObject, Thinking
from quire.text.message import MessageReader
from quire.text.reasoning import BEGIN, END, SPACE, ReasoningReader
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_calls import FORMATS, ToolReader, format_of
from quire.text.tool_grammar import OfferedTool, auto_grammar, call_grammar

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off: Qwen 3 and GLM 4.5; DeepSeek 3.1."""
EFFORT = "reasoning_effort"
"""The variable of gpt-oss, and the field of a request."""
DEFAULT_EFFORT = "medium"
TAIL_TOKENS = 32
"""Last tokens of a prompt, in which it is seen whether the model begins inside its reasoning."""


@dataclasses.dataclass(frozen=True, slots=True)
class MessageStyle:
    """How the loaded model writes what is not plain content; None: it does not, or nobody knows how."""

    tools: str | None = None
    """A key of `FORMATS`."""
    reasoning: str | None = None
    """`deepseek_r1` begins with reasoning unless that is switched off; `qwen3` as its prompt or text says."""
    auto_tools: bool = True
    """Whether the model may choose to call tools."""
    switch: str | None = None
    """The chat template's variable that turns reasoning on and off."""
    has_efforts: bool = False
    """The chat template knows `reasoning_effort`."""


def style_of(config: ServerConfig, llm: AsyncLLM) -> MessageStyle:
    """What the options say, and by default what the chat template teaches the model."""
    sources = [] if llm.chat_template is None else list(llm.chat_template.sources.values())
    tools: str | None = config.tool_call_parser
    if tools == "auto":
        tools = format_of(sources)
    reasoning: str | None = config.reasoning_parser
    if reasoning == "auto":
        reasoning = "qwen3" if any(BEGIN in source and END in source for source in sources) else None
    variables = frozenset[str]() if llm.chat_template is None else llm.chat_template.variables
    return MessageStyle(
        None if tools == "none" else tools,
        None if reasoning == "none" else reasoning,
        config.enable_auto_tool_choice,
        next((name for name in SWITCHES if name in variables), None),
        EFFORT in variables,
    )


def asked_effort(effort: str | None, thinking: Thinking | None, field: str = "reasoning_effort") -> str | None:
    """What an effort and `thinking` ask for together; 400 if they disagree. field: what the client calls the effort."""
    if thinking is None:
        return effort
    asked = {"adaptive": None, "disabled": "none", "enabled": DEFAULT_EFFORT}[thinking.type]
    if effort is not None and asked is not None and (effort == "none") != (asked == "none"):
        raise bad_request(f"thinking is {thinking.type}, but {field} is {shown(effort)}.", "thinking")
    return effort or asked


def thinking_budget(body: ChatRequest) -> int | None:
    """Tokens that the reasoning may have; None: as many as it takes."""
    ours, theirs = body.thinking_token_budget, None if body.thinking is None else body.thinking.budget_tokens
    if ours is not None and theirs is not None and ours != theirs:
        raise bad_request("thinking_token_budget and thinking.budget_tokens disagree: send one.", "thinking")
    budget, name = (theirs, "thinking.budget_tokens") if ours is None else (ours, "thinking_token_budget")
    if budget is not None and not 0 <= budget < 2**31:
        raise InvalidParameter(name, budget, "0 to 2147483647")
    return budget


def reasoning_kwargs(effort: str | None, style: MessageStyle) -> JsonObject:
    """Variables of the chat template that ask for a `reasoning_effort`. A 400 Refusal for one that it cannot ask for.

    Where the template has no word for it, only what happens anyway is taken: none where the model does not reason,
    medium where it always does.
    """
    if effort is None:
        return {}
    switched = {} if style.switch is None else {style.switch: effort != "none"}
    always = "none" if style.reasoning is None else DEFAULT_EFFORT
    if style.has_efforts:
        good = (["none"] if style.switch is not None else []) + ["low", "medium", "high"]
        kwargs = switched if effort == "none" else {EFFORT: effort, **switched}
    else:
        good = [always] if style.switch is None else ["none", DEFAULT_EFFORT]
        kwargs = switched
    if effort not in good:
        raise unsupported(
            EFFORT,
            f"the effort {shown(effort)} cannot be asked of this model, whose chat template has {', '.join(good)}.",
        )
    return kwargs


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a request adds to a plain completion."""

    reader: Callable[[], MessageReader] | None
    """Makes a reader for each choice; None: the text is the content."""
    structured: StructuredOutputsParams | None
    shows_special: bool
    """Marks of this model are special tokens: they must be in the text to be found."""


def reading_of(
    body: ChatRequest,
    style: MessageStyle,
    tokenizer: HfTokenizer | None,
    conversation: Conversation,
    prompt: list[int],
    structured: StructuredOutputsParams | None,
) -> Reading:
    """How the answer to `prompt` is read and constrained. conversation: as the template saw it."""
    tools = conversation.tools
    if tokenizer is None:
        return Reading(None, structured, False)
    constraint = _tool_constraint(body, style, tokenizer, _offered(body, tools), structured)
    thinks = style.reasoning is not None and not _ends_with(END, prompt, tokenizer)
    is_off = style.switch is not None and conversation.kwargs.get(style.switch) is False
    inside = thinks and (_ends_with(BEGIN, prompt, tokenizer) or (style.reasoning == "deepseek_r1" and not is_off))
    budget = thinking_budget(body) if thinks else None
    if budget is not None and tokenizer.token_id(END) in tokenizer.special_ids:
        raise unsupported("thinking_token_budget", "this model ends its reasoning with a control token.")
    if budget is not None:
        constraint = msgspec.structs.replace(constraint or StructuredOutputsParams(), begins_within=budget)
    if thinks and constraint is not None:
        constraint = msgspec.structs.replace(constraint, begins_after=END, may_begin_with=None if inside else BEGIN)
    names = [tool["function"]["name"] for tool in tools or []] if style.tools is not None else []
    if not names and not thinks:
        return Reading(None, constraint, False)

    def reader() -> MessageReader:
        return MessageReader(
            ReasoningReader(inside) if thinks else None,
            ToolReader(FORMATS[style.tools], names) if names and style.tools is not None else None,
        )

    marks = ([FORMATS[style.tools].mark] if names and style.tools is not None else []) + ([END] if thinks else [])
    special = any(tokenizer.token_id(mark) in tokenizer.special_ids for mark in marks)
    return Reading(reader, constraint, special)


def _ends_with(mark: str, prompt: list[int], tokenizer: HfTokenizer) -> bool:
    """Whether a prompt ends with a mark; where the mark is a token, its mere characters are somebody's text."""
    tail, token_id = prompt[-TAIL_TOKENS:], tokenizer.token_id(mark)
    if token_id in tail:
        after = tail[len(tail) - tail[::-1].index(token_id) :]
        return not tokenizer.decode(after, skip_special_tokens=False).strip(SPACE)
    return token_id is None and tokenizer.decode(tail, skip_special_tokens=False).rstrip(SPACE).endswith(mark)


def _offered(body: ChatRequest, tools: list[JsonObject] | None) -> list[OfferedTool]:
    strict = {tool.function.name: bool(tool.function.strict) for tool in body.tools or []}
    functions = [tool["function"] for tool in tools or []]
    return [OfferedTool(one["name"], one["parameters"], strict[one["name"]]) for one in functions]


def _tool_constraint(
    body: ChatRequest,
    style: MessageStyle,
    tokenizer: HfTokenizer,
    tools: list[OfferedTool],
    structured: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """The constraint with what the choice of tools needs. Only the model's free choice of loose tools needs nothing."""
    if not tools:
        return structured
    choice = "auto" if body.tool_choice is None else body.tool_choice
    at_most_one = body.parallel_tool_calls is False
    if choice == "auto" and not style.auto_tools:
        raise unsupported(
            "tool_choice", "auto is switched off here; the operator can start with --enable-auto-tool-choice."
        )
    is_free = choice == "auto" and not at_most_one and not any(tool.strict for tool in tools)
    if is_free and structured is None:
        return None
    if style.tools is None:
        raise unsupported(
            "response_format" if is_free else "tool_choice" if choice != "auto" else "tools",
            "this model's way of calling tools is not known, so that it cannot be enforced; the operator can name it "
            "with --tool-call-parser.",
        )
    if choice == "auto" and structured is None:
        return StructuredOutputsParams(calls=auto_grammar(style.tools, tools, tokenizer, at_most_one=at_most_one))
    if isinstance(choice, dict):
        tools, at_most_one = [tool for tool in tools if tool.name == choice["function"]["name"]], True
    calls = call_grammar(style.tools, tools, tokenizer, at_most_one=at_most_one)
    if structured is None:
        return StructuredOutputsParams(calls=calls)
    if choice != "auto":
        raise bad_request(
            "tool_choice forces a call and leaves nothing for the text that is constrained.", "tool_choice"
        )
    return msgspec.structs.replace(structured, calls=calls)
