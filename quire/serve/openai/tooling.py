"""Tools and reasoning of one chat request: how the model's text will be read, and which grammar its choice needs.

Owns the meaning of `tool_choice`, `parallel_tool_calls` and `strict` together with `response_format`, and that of
`reasoning_effort`. Does not own the formats (`text/tool_formats`) nor their grammars (`text/tool_grammar`).
Invariants: a choice that forces calls is enforced by a grammar or refused by name, never merely asked of the model; an
effort is one that the chat template can ask of the model, or it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import msgspec

from quire.core.errors import shown
from quire.core.sampling import CHECKS
from quire.core.structured import StructuredOutputsParams
from quire.engine.async_llm import AsyncLLM
from quire.serve.config import ServerConfig
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import Refusal, bad_request, unsupported
from quire.serve.openai.conversation import Conversation
from quire.serve.openai.schema import ChatRequest, JsonObject, Thinking
from quire.text import harmony
from quire.text.harmony import HarmonyReader, is_answer, is_harmony
from quire.text.harmony_frame import framed
from quire.text.harmony_tokens import HarmonyCount, begun_in, has_mark_tokens, turn_ends
from quire.text.message import MessageReader
from quire.text.reasoning import BEGIN, END, ReasoningReader
from quire.text.reasoning_count import CountsReasoning, ReasoningCount
from quire.text.thinking import after_thinking, ends_by_control_token, ends_with, has_marks
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_formats import format_of, marks_of, reader_of
from quire.text.tool_grammar import OfferedTool, auto_grammar, call_grammar

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off: Qwen 3 and GLM 4.5; DeepSeek 3.1."""
EFFORT = "reasoning_effort"
"""The variable of gpt-oss, and the field of a request."""
DEFAULT_EFFORT = "medium"
_OTHER_DEFAULTS = {"output_config.effort": "high"}
"""Of clients that call it so."""
_SWITCHED = {"adaptive": None, "disabled": "none", "enabled": DEFAULT_EFFORT}


@dataclasses.dataclass(frozen=True, slots=True)
class MessageStyle:
    """How the loaded model writes what is not plain content; None: it does not, or nobody knows how."""

    tools: str | None = None
    """The name of a format, as in `text/tool_formats`, or `openai`."""
    reasoning: str | None = None
    """`deepseek_r1` begins with reasoning unless that is switched off; `qwen3` as its prompt or text says;
    `openai_gptoss` in messages of its own."""
    auto_tools: bool = True
    """Whether the model may choose to call tools."""
    switch: str | None = None
    """The chat template's variable that turns reasoning on and off."""
    has_efforts: bool = False
    """The chat template knows `reasoning_effort`."""

    @property
    def is_harmony(self) -> bool:
        """The model answers in messages."""
        return self.tools == harmony.TOOLS or self.reasoning == harmony.REASONING

    @property
    def efforts(self) -> tuple[str, ...]:
        """What can be asked of the chat template. Where it has no word for it, that is what happens anyway: none where
        the model does not reason, medium where it always does."""
        if self.has_efforts:
            return (*(["none"] if self.switch is not None else []), "low", DEFAULT_EFFORT, "high")
        if self.switch is not None:
            return ("none", DEFAULT_EFFORT)
        return ("none",) if self.reasoning is None else (DEFAULT_EFFORT,)

    @property
    def knows(self) -> str:
        """What the chat template has for it, in words that go on from "this model"."""
        if self.has_efforts:
            return f"whose chat template has {'a switch and ' if self.switch is not None else ''}efforts for reasoning"
        if self.switch is not None:
            return "whose chat template can only switch reasoning on and off"
        return f"whose chat template cannot switch reasoning {'on' if self.reasoning is None else 'off'}"

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words. None takes images."""
        has = {"completion": True, "tools": self.tools is not None, "thinking": self.reasoning is not None}
        return [word for word, has_it in has.items() if has_it]


def style_of(config: ServerConfig, llm: AsyncLLM) -> MessageStyle:
    """What the options say, and by default what the chat template teaches the model."""
    sources = [] if llm.chat_template is None else list(llm.chat_template.sources.values())
    tools: str | None = config.tool_call_parser
    reasoning: str | None = config.reasoning_parser
    in_messages = tools == harmony.TOOLS or reasoning == harmony.REASONING
    if tools in ("auto", "none") and reasoning in ("auto", "none"):
        in_messages = is_harmony(sources)
    if tools == "auto":
        tools = harmony.TOOLS if in_messages else format_of(sources)
    if reasoning == "auto":
        reasoning = harmony.REASONING if in_messages else "qwen3" if has_marks(sources) else None
    variables = frozenset[str]() if llm.chat_template is None else llm.chat_template.variables
    return MessageStyle(
        None if tools == "none" else tools,
        None if reasoning == "none" else reasoning,
        config.enable_auto_tool_choice,
        next((name for name in SWITCHES if name in variables), None),
        EFFORT in variables,
    )


def thinking_budget(body: ChatRequest) -> int | None:
    """Tokens that the reasoning may have; None: as many as it takes."""
    ours, theirs = body.thinking_token_budget, None if body.thinking is None else body.thinking.budget_tokens
    if ours is not None and theirs is not None and ours != theirs:
        raise bad_request("thinking_token_budget and thinking.budget_tokens disagree: send one.", "thinking")
    budget, name = (theirs, "thinking.budget_tokens") if ours is None else (ours, "thinking_token_budget")
    CHECKS.one("thinking_token_budget", budget, called=name)
    return budget


def reasoning_kwargs(
    effort: str | None, thinking: Thinking | None, style: MessageStyle, ignored: IgnoredParams, called: str = EFFORT
) -> JsonObject:
    """Variables of the chat template that ask for what an effort and `thinking` say together.

    A 400 Refusal, which names the one at fault, for what the template cannot ask for, and where the two disagree. The
    client's default effort asks for nothing where there are no efforts, and no reasoning to switch on. called: the
    client's name of the effort.
    """
    switched = None if thinking is None else _SWITCHED[thinking.type]
    if thinking is not None and switched is not None and switched not in style.efforts:
        words = {"none": "disabled", DEFAULT_EFFORT: "enabled", "low": "", "high": ""}
        raise cannot_ask("thinking", f"the type {shown(thinking.type)}", style, words, "adaptive")
    if effort == _OTHER_DEFAULTS.get(called, DEFAULT_EFFORT) and (switched == "none" or effort not in style.efforts):
        ignored.note(called)
        effort = None
    if thinking and effort is not None and switched is not None and (effort == "none") != (switched == "none"):
        raise bad_request(f"thinking is {thinking.type}, but {called} is {shown(effort)}.", "thinking")
    effort = switched if effort is None else effort
    if effort is None:
        return {}
    if effort not in style.efforts:
        raise cannot_ask(called, shown(effort), style, {})
    found: JsonObject = {} if style.switch is None else {style.switch: effort != "none"}
    return {EFFORT: effort, **found} if style.has_efforts and effort != "none" else found


def cannot_ask(param: str, value: str, style: MessageStyle, words: Mapping[str, str], also: str = "") -> Refusal:
    """A 400 for what the chat template cannot be asked for. words: the client's for an effort; "" for none."""
    taken = [words.get(effort, effort) for effort in style.efforts]
    says = ", ".join(filter(None, (*taken, also)))
    return unsupported(param, f"{value} cannot be asked of this model, {style.knows}; it takes {says}.")


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a request adds to a plain completion."""

    reader: Callable[[], MessageReader] | None
    """Makes a reader for each choice; None: the text is the content."""
    structured: StructuredOutputsParams | None
    shows_special: bool
    """Marks of this model are special tokens: they must be in the text to be found."""
    count: Callable[[], CountsReasoning] | None = None
    """Makes what counts the reasoning of each choice; None: there is none."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a turn, also where the checkpoint's files do not say so."""


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
    offered = _offered(body, tools)
    constraint = _tool_constraint(body, style, tokenizer, offered, structured)
    if style.is_harmony:
        offered = offered if style.tools is not None else []
        return _reading_of_messages(body, style, tokenizer, offered, prompt, constraint)
    thinks = style.reasoning is not None and not ends_with(END, prompt, tokenizer)
    is_off = style.switch is not None and conversation.kwargs.get(style.switch) is False
    inside = thinks and (ends_with(BEGIN, prompt, tokenizer) or (style.reasoning == "deepseek_r1" and not is_off))
    budget = thinking_budget(body) if thinks else None
    if budget is not None and ends_by_control_token(tokenizer):
        raise unsupported("thinking_token_budget", "this model ends its reasoning with a control token.")
    if thinks and constraint is not None and constraint.frame is not None:
        raise unsupported("structured_outputs", "frame says where the answer begins; here reasoning does.")
    if thinks and (constraint is not None or budget is not None):
        own = None if constraint is None else constraint.begins_within
        constraint = after_thinking(constraint, is_inside=inside, budget=own if budget is None else budget)
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools or []}
    calls = style.tools if functions else None
    must_call = calls is not None and body.tool_choice not in (None, "auto")
    if calls is None and not thinks:
        return Reading(None, constraint, False)

    def reader() -> MessageReader:
        tools_reader = None if calls is None else reader_of(calls, functions)
        return MessageReader(ReasoningReader(inside) if thinks else None, tools_reader, must_call=must_call)

    marks = (() if calls is None else marks_of(calls)) + ((END,) if thinks else ())
    special = any(tokenizer.token_id(mark) in tokenizer.special_ids for mark in marks)
    return Reading(reader, constraint, special, (lambda: ReasoningCount(inside, tokenizer)) if thinks else None)


def _reading_of_messages(
    body: ChatRequest,
    style: MessageStyle,
    tokenizer: HfTokenizer,
    offered: list[OfferedTool],
    prompt: list[int],
    constraint: StructuredOutputsParams | None,
) -> Reading:
    """The same in the Harmony format. offered: functions whose calls are read. constraint: as it is for the answer
    alone."""
    begun, budget = begun_in(prompt, tokenizer), thinking_budget(body)
    if (constraint is not None or budget is not None) and not has_mark_tokens(tokenizer):
        raise unsupported(
            "response_format" if budget is None else "thinking_token_budget",
            "nothing can be enforced in this model's messages, whose marks are no tokens of its own.",
        )
    if constraint is not None and (constraint.begins_after or constraint.frame) is not None:
        raise unsupported("structured_outputs", "this model's format says itself where the answer begins.")
    if begun and constraint is not None and (constraint.calls is not None or not is_answer(begun)):
        raise unsupported("continue_final_message", "amid a message only the answer is constrained, by no call.")
    if begun and budget is not None and not is_answer(begun):
        raise unsupported("thinking_token_budget", "reasoning that is continued has no bound of its own.")
    if not begun and (constraint is not None or budget is not None):
        if constraint is None and offered:
            calls = auto_grammar(harmony.TOOLS, offered, tokenizer, at_most_one=True)
            constraint = StructuredOutputsParams(calls=calls)
        constraint = framed(constraint, tokenizer, budget)
    names, reasons = [tool.name for tool in offered], style.reasoning is not None
    count = (lambda: HarmonyCount(prompt, tokenizer)) if reasons else None

    def reader() -> MessageReader:
        return HarmonyReader(names, reasons=reasons, begun=begun)

    return Reading(reader, constraint, True, count, turn_ends(tokenizer))


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
